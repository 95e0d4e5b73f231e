"""Ray's blocking calls, on one thread and with time limits: while Ray hangs, the controller's event loop goes on."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

CALL_SECONDS = 10.0

P = ParamSpec("P")
T = TypeVar("T")


class RayHangsError(TimeoutError):
    """Ray has not answered in time: no evidence about a replica, and a reason to try again later."""


class RayCalls:
    """Calls one after the other, in order. A call that hangs occupies the thread until Ray's client gives up."""

    def __init__(self, seconds: float | None = None) -> None:
        """seconds: of a call, with its wait for the calls before it; None: CALL_SECONDS."""
        self._seconds = CALL_SECONDS if seconds is None else seconds
        self.before: Callable[[], object] | None = None  # runs before each call, which is not made if it raises
        self._queue: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        # A daemon: a call that hangs must not keep a process that is to end.
        threading.Thread(target=self._work, name="ray", daemon=True).start()

    async def run(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        """The result of `work`. Raises RayHangsError; work that had not begun by then never begins."""

        def call() -> T:
            if self.before is not None:
                self.before()
            return work(*args, **named)

        waiting: Future[T] = Future()
        self._queue.put((waiting, call))
        future = asyncio.wrap_future(waiting)
        try:
            async with asyncio.timeout(self._seconds):
                return await future
        except TimeoutError as error:
            if not future.cancelled():
                raise  # the work itself raised this error
            raise RayHangsError(f"Ray has not answered within {self._seconds:g} s") from error

    def _work(self) -> None:
        while True:
            future, call = self._queue.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

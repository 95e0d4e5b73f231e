"""An asyncio event loop in virtual time: the coroutines of one simulated process, as in production."""

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from contextvars import Context
from functools import partial
from typing import Any

from support.simulation.world import Owner, World


class VirtualLoop(asyncio.AbstractEventLoop):
    """Its calls are events of the world: lost when the process is killed, delayed while it is frozen.

    It has no sockets, threads or signals: a coroutine that needs them raises NotImplementedError.
    """

    def __init__(self, world: World, owner: Owner, rate: float = 1.0) -> None:
        """rate: seconds of its clock per second."""
        self._world = world
        self._owner = owner
        self._rate = rate
        self._closing: deque[asyncio.Handle] | None = None  # its last calls, outside of virtual time
        self._tasks: list[asyncio.Task[Any]] = []  # kept, so that none is collected before the end of the schedule

    @contextmanager
    def entered(self) -> Iterator[None]:
        """As if called by this loop."""
        outer = asyncio._get_running_loop()
        asyncio._set_running_loop(self)
        try:
            yield
        finally:
            asyncio._set_running_loop(outer)

    def time(self) -> float:
        return self._world.now * self._rate

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        if self._closing is not None:
            self._closing.append(handle)
        else:
            self._world.at(0.0, partial(self._run_handle, handle), self._owner)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        delay = max(0.0, when - self.time()) / self._rate
        self._world.at(delay, partial(self._run_handle, handle), self._owner)
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:  # type: ignore[override]
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, **options)
        self._tasks.append(task)
        return task

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def get_debug(self) -> bool:
        return False

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """A callback failed: the schedule fails. Tasks that the end of a schedule leaves are no failure."""
        error = context.get("exception")
        if self._closing is None and isinstance(error, Exception) and "callback" in str(context.get("message", "")):
            self._world.fail(f"{context['message']}: {type(error).__name__}: {error}")

    def close(self) -> None:
        """At the end of a schedule: cancels what still waits."""
        self._closing = deque()
        for task in self._tasks:
            task.cancel()
        while self._closing:
            self._run_handle(self._closing.popleft())
        self._tasks.clear()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Nothing to do: its event finds it cancelled."""

    def _run_handle(self, handle: asyncio.Handle) -> None:
        if not handle.cancelled():
            with self.entered():
                handle._run()

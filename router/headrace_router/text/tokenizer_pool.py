"""Threads for parsing, rendering and tokenizing: bounded in number, queue and time, shared fairly."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from headrace_base.errors import panics_as_errors
from headrace_router.core.errors import OverloadedError, SlowPromptError
from headrace_router.core.fair_queue import FairQueue
from headrace_router.core.limits import Limits

T = TypeVar("T")

LARGE = 100_000  # characters or bytes; such work never takes all threads, so small work never waits for it


@dataclass(slots=True, eq=False)
class _Turn:
    """One piece of work, which waits for a thread."""

    granted: "asyncio.Future[None]"
    large: bool


class TokenizerPool:
    """Runs the text work of one request at a time per thread."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._small: FairQueue[_Turn] = FairQueue(limits.tokenize_queue)
        self._large: FairQueue[_Turn] = FairQueue(limits.tokenize_queue)
        self._free = limits.tokenize_threads
        self._large_free = max(1, limits.tokenize_threads - 1)
        self._small_next = False  # where both may run
        self._threads = ThreadPoolExecutor(limits.tokenize_threads, thread_name_prefix="tokenize")

    async def run(self, work: Callable[[], T], tenant: str, size: int) -> T:
        """The result of `work`, whose time grows with `size`: characters, bytes or tokens.

        Raises OverloadedError when it cannot begin, SlowPromptError when it takes too long. A thread cannot be
        stopped: work that exceeded its time keeps its thread until it ends by itself, so many such requests are
        refused and do not accumulate.
        """
        turn = _Turn(asyncio.get_running_loop().create_future(), size >= LARGE)
        await self._wait(turn, tenant, size)
        future = asyncio.get_running_loop().run_in_executor(self._threads, _run, work)
        future.add_done_callback(lambda done: self._release(turn, done))
        try:
            async with asyncio.timeout(self._limits.tokenize_seconds):
                return await asyncio.shield(future)
        except TimeoutError:
            raise SlowPromptError("Tokenizing this request takes too long; send a shorter prompt.") from None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _wait(self, turn: _Turn, tenant: str, size: int) -> None:
        """Until a thread is reserved for the turn."""
        queue = self._large if turn.large else self._small
        refused = queue.add(tenant, max(1, size), turn)
        if refused is not None and not refused.granted.done():
            refused.granted.set_exception(
                OverloadedError("Too many requests are waiting to be tokenized; try again in a moment.")
            )
        self._grant()
        try:
            async with asyncio.timeout(self._limits.queue_seconds):
                await turn.granted
        except BaseException as error:
            if not queue.remove(tenant, turn) and _is_granted(turn):
                self._give_back(turn)
            if isinstance(error, TimeoutError):
                raise OverloadedError("The request waited too long to be tokenized; try again in a moment.") from None
            raise

    def _grant(self) -> None:
        """Reserves free threads for those that wait."""
        while self._free:
            queues = [queue for queue, usable in ((self._large, self._large_free), (self._small, True)) if usable]
            if len(queues) == 2 and self._small_next:
                queues.reverse()
            turn = next((turn for queue in queues if (turn := queue.take()) is not None), None)
            if turn is None:
                return
            if turn.granted.done():  # cancelled a moment ago
                continue
            self._small_next = turn.large
            self._free -= 1
            self._large_free -= turn.large
            turn.granted.set_result(None)

    def _release(self, turn: _Turn, future: "asyncio.Future[Any]") -> None:
        if not future.cancelled():
            future.exception()  # marks the exception of abandoned work as retrieved
        self._give_back(turn)

    def _give_back(self, turn: _Turn) -> None:
        self._free += 1
        self._large_free += turn.large
        self._grant()


def _run(work: Callable[[], T]) -> T:
    with panics_as_errors():
        return work()


def _is_granted(turn: _Turn) -> bool:
    granted = turn.granted
    return granted.done() and not granted.cancelled() and granted.exception() is None

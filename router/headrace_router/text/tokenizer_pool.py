"""Threads for rendering and tokenizing: bounded in number, queue and time (docs/reliability.md R7)."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from headrace_router.core.errors import InvalidRequestError, OverloadedError
from headrace_router.core.limits import Limits

T = TypeVar("T")


class TokenizerPool:
    """Runs the text work of one request at a time per thread."""

    def __init__(self, limits: Limits) -> None:
        self._seconds = limits.tokenize_seconds
        self._capacity = limits.tokenize_queue + limits.tokenize_threads
        self._busy = 0
        self._threads = ThreadPoolExecutor(limits.tokenize_threads, thread_name_prefix="tokenize")

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`. Raises OverloadedError when too many wait, InvalidRequestError when it takes too long.

        A thread cannot be stopped: work that exceeded its time keeps its slot until it ends by itself, so many such
        requests are refused and do not accumulate.
        """
        if self._busy >= self._capacity:
            raise OverloadedError("Too many requests are waiting to be tokenized; try again in a moment.")
        self._busy += 1
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        future.add_done_callback(self._release)
        try:
            async with asyncio.timeout(self._seconds):
                return await asyncio.shield(future)
        except TimeoutError:
            raise InvalidRequestError(
                "Tokenizing this request takes too long; send a shorter prompt.", code="prompt_too_slow"
            ) from None

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _release(self, future: "asyncio.Future[T]") -> None:
        self._busy -= 1
        if not future.cancelled():
            future.exception()  # marks the exception of abandoned work as retrieved

"""Threads for rendering and tokenizing: bounded in number, queue and time (RELIABILITY R7)."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from headrace_router.errors import InvalidRequestError, OverloadedError
from headrace_router.limits import Limits

T = TypeVar("T")


class TokenizerPool:
    """Runs one request's text work at a time per thread."""

    def __init__(self, limits: Limits) -> None:
        self._seconds = limits.tokenize_seconds
        self._room = limits.tokenize_queue + limits.tokenize_threads
        self._busy = 0
        self._threads = ThreadPoolExecutor(limits.tokenize_threads, thread_name_prefix="tokenize")

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`. Raises OverloadedError when too many wait, InvalidRequestError when it takes too long.

        A thread cannot be stopped: work that is out of time keeps its place until it ends by itself, so a flood of
        such requests is refused rather than piled up.
        """
        if self._busy >= self._room:
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
            future.exception()  # an abandoned failure needs no one to look at it

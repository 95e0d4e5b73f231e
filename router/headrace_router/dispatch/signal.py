"""Wakes the one reader of a stream."""

import asyncio


class Signal:
    """What asyncio.Event and asyncio.timeout do together, for one reader that waits once per token.

    A timer for each wait would cost as much as all else that a token costs. One is kept instead, which checks how long
    the reader has waited when it is due.
    """

    def __init__(self) -> None:
        self._set = False
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._since = 0.0  # of the wait, on the event loop's clock

    def set(self) -> None:
        self._set = True
        self._wake()

    async def wait(self, seconds: float | None = None) -> bool:
        """Waits until it is set, and clears it; False after so many seconds in which it was not set.

        seconds: the same in all waits.
        """
        if not self._set:
            loop = asyncio.get_running_loop()
            self._waiter = loop.create_future()
            if seconds is not None:
                self._since = loop.time()
                if self._timer is None:
                    self._timer = loop.call_later(seconds, self._check, seconds)
            try:
                await self._waiter
            finally:
                self._waiter = None
        found, self._set = self._set, False
        return found

    def close(self) -> None:
        """There is no further wait."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _check(self, seconds: float) -> None:
        self._timer = None
        if self._waiter is None:
            return  # the next wait makes a timer
        loop = asyncio.get_running_loop()
        left = self._since + seconds - loop.time()
        if left > 0:
            self._timer = loop.call_later(left, self._check, seconds)
        else:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

"""Aborts a connection whose client does not read."""

import asyncio

PROGRESS_BYTES = 64 << 10


class WriteWatch:
    """Of one connection. While it is on, the client must read 64 KiB per period, or all that is left."""

    def __init__(self, transport: asyncio.Transport, seconds: float) -> None:
        self._transport = transport
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._left = 0  # bytes in the buffer when the period began

    def start(self) -> None:
        """Begins a period if bytes wait to be sent and none has begun."""
        if self._timer is None:
            self._begin(self._transport.get_write_buffer_size())

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self, left: int) -> None:
        if left:
            self._left = left
            self._timer = self._loop.call_later(self._seconds, self._check)

    def _check(self) -> None:
        self._timer = None
        left = self._transport.get_write_buffer_size()
        if left > max(0, self._left - PROGRESS_BYTES):
            self._transport.abort()
        else:
            self._begin(left)

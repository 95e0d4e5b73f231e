"""Aborts a connection whose client does not read."""

import asyncio
from typing import Protocol

PROGRESS_BYTES = 64 << 10


class Written(Protocol):
    """The part of a transport that is watched."""

    def write(self, data: bytes) -> None: ...

    def get_write_buffer_size(self) -> int: ...

    def abort(self) -> None: ...


class WriteWatch:
    """Of one connection, all of whose bytes are written here.

    While any are buffered, the client must read 64 KiB per period, or as many as were buffered when it began: after the
    response, too, and while the connection is closing, which waits until the client has read the rest.
    """

    def __init__(self, transport: Written, seconds: float) -> None:
        self._transport = transport
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._written = 0  # bytes, of the connection
        self._due = 0  # how many the client must have read at the end of the period

    def write(self, data: bytes) -> None:
        self._written += len(data)
        self._transport.write(data)
        if self._timer is None:
            self._begin()

    def stop(self) -> None:
        """The connection is lost."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self) -> None:
        left = self._transport.get_write_buffer_size()
        if left:
            self._due = self._written - left + min(left, PROGRESS_BYTES)
            self._timer = self._loop.call_later(self._seconds, self._check)

    def _check(self) -> None:
        self._timer = None
        if self._written - self._transport.get_write_buffer_size() < self._due:
            self._transport.abort()
        else:
            self._begin()

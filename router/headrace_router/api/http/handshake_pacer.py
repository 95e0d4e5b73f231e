"""TLS handshakes on the event loop, in slices: one slice per turn, whatever the number of clients that begin one."""

import asyncio
import time
from collections import deque
from collections.abc import Callable

SLICE_SECONDS = 0.002  # of handshakes in a turn of the event loop; one step, of 0.3 to 5 ms, may exceed it
READ_BYTES = 16 << 10


class HandshakePacer:
    """Runs steps in the order in which they were submitted. One per listening socket."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(READ_BYTES))  # of all connections: it is copied before the next one reads
        self._steps: deque[Callable[[], None]] = deque()
        self._scheduled = False

    def submit(self, step: Callable[[], None]) -> None:
        """Calls it in one of the next turns."""
        self._steps.append(step)
        self._schedule()

    def _schedule(self) -> None:
        if self._steps and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        end = time.perf_counter() + SLICE_SECONDS
        try:
            while self._steps:
                self._steps.popleft()()
                if time.perf_counter() >= end:
                    return
        finally:
            self._schedule()


class PacedHandshake(asyncio.BufferedProtocol):
    """Between a connection and asyncio's TLS protocol until the handshake is done: what arrives waits for its slice."""

    def __init__(self, transport: asyncio.Transport, tls: asyncio.BufferedProtocol, pacer: HandshakePacer) -> None:
        self._transport = transport
        self._tls = tls
        self._pacer = pacer
        self._lost = False

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._pacer.buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._pacer.buffer[:nbytes])
        self._transport.pause_reading()
        self._pacer.submit(lambda: self._deliver(data))

    def eof_received(self) -> bool:
        self._pacer.submit(self._end)
        return True  # it is closed in its turn

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._pacer.submit(lambda: self._tls.connection_lost(exc))

    def pause_writing(self) -> None:
        self._tls.pause_writing()

    def resume_writing(self) -> None:
        self._tls.resume_writing()

    def _end(self) -> None:
        if not self._lost and not self._tls.eof_received():
            self._transport.close()

    def _deliver(self, data: bytes) -> None:
        while data and not self._lost:
            buffer = memoryview(self._tls.get_buffer(len(data)))
            count = min(len(buffer), len(data))
            buffer[:count] = data[:count]
            self._tls.buffer_updated(count)
            data = data[count:]
        self._transport.resume_reading()

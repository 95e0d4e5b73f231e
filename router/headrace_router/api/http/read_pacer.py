"""What clients without a key send is read in slices: one slice per turn, whatever the number of these clients."""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from headrace_router.api.http.connection_counter import client_of

SLICE_SECONDS = 0.002  # of reads in a turn of the event loop; one step, of up to 5 ms, may exceed it
READ_BYTES = 4 << 10  # of a step: as many bytes of key updates in TLS take 2.4 ms
OVERHEAD_BYTES = 64 << 10  # of TLS, without application data between them


class ReadPacer:
    """Runs steps, one of each client in turn; those of one in order. One per listening socket."""

    def __init__(self) -> None:
        self.buffer = memoryview(bytearray(READ_BYTES))  # of all connections: it is copied before the next one reads
        self._steps: OrderedDict[str, deque[Callable[[], None]]] = OrderedDict()  # by client, in turn; none is empty
        self._scheduled = False

    def submit(self, client: str, step: Callable[[], None]) -> None:
        """Calls it in one of the next turns."""
        self._steps.setdefault(client, deque()).append(step)
        self._schedule()

    def _take(self) -> Callable[[], None]:
        client, steps = self._steps.popitem(last=False)
        step = steps.popleft()
        if steps:
            self._steps[client] = steps  # after all others
        return step

    def _schedule(self) -> None:
        if self._steps and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        end = time.perf_counter() + SLICE_SECONDS
        try:
            while self._steps:
                self._take()()
                if time.perf_counter() >= end:
                    return
        finally:
            self._schedule()


class PacedConnection(asyncio.BufferedProtocol):
    """Between a connection and its protocol until `release`: what arrives waits for its slice."""

    def __init__(
        self, transport: asyncio.Transport, protocol: asyncio.Protocol | asyncio.BufferedProtocol, pacer: ReadPacer
    ) -> None:
        self._transport = transport
        self._protocol = protocol
        self._pacer = pacer
        peer = transport.get_extra_info("peername")
        self._client = client_of(peer[0] if peer else "")
        self._waiting = 0  # steps
        self._overhead = 0  # bytes since the last application data
        self._released = False
        self._lost = False

    def release(self) -> None:
        """The client has shown a key: what arrives after the bytes that wait is read without a slice."""
        self._released = True
        self._leave()

    def progressed(self) -> None:
        """Application data has arrived."""
        self._overhead = 0

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._pacer.buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._pacer.buffer[:nbytes])
        self._transport.pause_reading()
        self._submit(lambda: self._deliver(data))

    def eof_received(self) -> bool:
        self._submit(self._end)
        return True  # it is closed in its turn

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._submit(lambda: self._protocol.connection_lost(exc))

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def _submit(self, step: Callable[[], None]) -> None:
        self._waiting += 1
        self._pacer.submit(self._client, lambda: self._run(step))

    def _run(self, step: Callable[[], None]) -> None:
        self._waiting -= 1
        try:
            step()
        except BaseException:
            self._transport.abort()  # as asyncio does after such an error
            raise
        self._leave()

    def _leave(self) -> None:
        if self._released and not (self._waiting or self._lost):
            self._transport.set_protocol(self._protocol)

    def _end(self) -> None:
        if not self._lost and not self._protocol.eof_received():
            self._transport.close()

    def _deliver(self, data: bytes) -> None:
        if self._lost:
            return
        self._overhead += len(data)
        if self._overhead > OVERHEAD_BYTES:
            self._transport.abort()
            return
        self._transport.resume_reading()  # first: the protocol may pause it again
        if isinstance(self._protocol, asyncio.BufferedProtocol):
            _fill(self._protocol, data)
        else:
            self._protocol.data_received(data)


def _fill(protocol: asyncio.BufferedProtocol, data: bytes) -> None:
    while data:
        buffer = memoryview(protocol.get_buffer(len(data)))
        count = min(len(buffer), len(data))
        buffer[:count] = data[:count]
        protocol.buffer_updated(count)
        data = data[count:]

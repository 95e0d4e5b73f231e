"""What clients send is read in slices: one slice per turn for those without a key, and one for those with a key."""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from headrace_router.api.client_address import client_of

SLICE_SECONDS = 0.002  # of reads in a turn of the event loop; one step, of up to 5 ms, may exceed it
STEPS_PER_TURN = 16  # each may begin a request, whose own work is not in the slice
READ_BYTES = 4 << 10  # of a step: as many bytes of key updates in TLS take 2.4 ms
KEYED_READ_BYTES = 8 << 10  # the same with a key; a connection has a step in a turn at most, so that bodies take fewer
OVERHEAD_BYTES = 64 << 10  # of TLS, without application data between them


class ReadPacer:
    """Runs steps, one of each client in turn; those of one in order."""

    def __init__(self, read_bytes: int = READ_BYTES) -> None:
        self.buffer = memoryview(bytearray(read_bytes))  # of all connections: it is copied before the next one reads
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
            for _ in range(STEPS_PER_TURN):
                if not self._steps:
                    return
                self._take()()
                if time.perf_counter() >= end:
                    return
        finally:
            self._schedule()


class ReadPacers:
    """Those of one listening socket: clients without a key take no time from those with one."""

    def __init__(self) -> None:
        self.keyless = ReadPacer()  # by address
        self.keyed = ReadPacer(KEYED_READ_BYTES)  # by tenant


class PacedConnection(asyncio.BufferedProtocol):
    """Between a connection and its protocol: what arrives waits for its slice."""

    def __init__(
        self, transport: asyncio.Transport, protocol: asyncio.Protocol | asyncio.BufferedProtocol, pacers: ReadPacers
    ) -> None:
        self._transport = transport
        self._protocol = protocol
        self._keyed = pacers.keyed
        self._pacer = pacers.keyless
        peer = transport.get_extra_info("peername")
        self._client = client_of(peer[0] if peer else "")
        self._waiting = 0  # steps
        self._overhead = 0  # bytes since the last application data
        self._tenant: str | None = None
        self._lost = False

    def assign(self, tenant: str | None) -> None:
        """The client may call: what arrives after the bytes that wait is read in the slices of those with a key.

        tenant: whose key it has shown; None = the server has no keys, and the client is its address.
        """
        self._tenant = tenant or self._client
        self._change_pacer()

    def progressed(self) -> None:
        """Application data has arrived."""
        self._overhead = 0

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._pacer.buffer

    def buffer_updated(self, nbytes: int) -> None:
        data = bytes(self._pacer.buffer[:nbytes])
        self._transport.pause_reading()
        self.submit(lambda: self._deliver(data))

    def eof_received(self) -> bool:
        self.submit(self._end)
        return True  # it is closed in its turn

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self.submit(lambda: self._protocol.connection_lost(exc))

    def pause_writing(self) -> None:
        self._protocol.pause_writing()

    def resume_writing(self) -> None:
        self._protocol.resume_writing()

    def submit(self, step: Callable[[], None]) -> None:
        """Calls it in the client's turn, after what has arrived before."""
        self._waiting += 1
        self._pacer.submit(self._client, lambda: self._run(step))

    def _run(self, step: Callable[[], None]) -> None:
        self._waiting -= 1
        try:
            step()
        except BaseException:
            self._transport.abort()  # as asyncio does after such an error
            raise
        self._change_pacer()

    def _change_pacer(self) -> None:
        if self._tenant is not None and not self._waiting:  # else steps of one connection could change their order
            self._pacer, self._client = self._keyed, self._tenant

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

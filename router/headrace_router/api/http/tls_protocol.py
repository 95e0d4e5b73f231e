"""The TLS handshake of a connection, bounded and counted like the connection itself."""

import asyncio
import ssl
import time
from asyncio.sslproto import SSLProtocol
from collections.abc import Callable
from typing import Any

import structlog

from headrace_router.api.http.connection_counter import ConnectionCounter
from headrace_router.api.http.plain_protocol import plain_protocol
from headrace_router.api.http.protocol import LINGER_SECONDS, BoundedProtocol, bounded_protocol
from headrace_router.api.http.read_pacer import PacedConnection, ReadPacers
from headrace_router.core.limits import Limits

READ_BYTES = 16 << 10  # decrypted per turn of the event loop, and the buffer of each connection
WRITE_BYTES = 64 << 10  # that wait to be encrypted, for a client that does not read
LOG_SECONDS = 10.0  # between two lines about handshakes that failed

log = structlog.get_logger("headrace.tls")

TlsContext = Callable[[], ssl.SSLContext]  # the one for the next handshake


class Handshakes:
    """Settings and bounds of the handshakes of one listening socket."""

    def __init__(self, tls: TlsContext, counter: ConnectionCounter, seconds: float) -> None:
        """counter: of the connections with a handshake, too. seconds: for a handshake."""
        # By default asyncio allocates and reads 256 KiB per connection; there is no argument for it.
        SSLProtocol.max_size = READ_BYTES
        self.counter = counter
        self._tls = tls
        self._seconds = seconds
        self._pacers = ReadPacers()
        self._failures = 0  # since the last one in the log
        self._logged_at = -LOG_SECONDS

    def failed(self, address: str, error: OSError) -> None:
        """Logs some of the handshakes that fail: no TLS, a refused certificate, a timeout, a client that leaves."""
        self._failures += 1
        if time.monotonic() - self._logged_at >= LOG_SECONDS:
            log.info("TLS handshakes failed", count=self._failures, client=address, reason=str(error)[:200])
            self._failures, self._logged_at = 0, time.monotonic()

    async def complete(
        self, transport: asyncio.Transport, protocol: asyncio.Protocol
    ) -> tuple[asyncio.Transport, PacedConnection]:
        """The encrypted transport, and what paces its bytes. Raises OSError, after it closed `transport`."""
        loop = asyncio.get_running_loop()
        handshake = loop.create_task(
            loop.start_tls(
                transport,
                protocol,
                self._tls(),
                server_side=True,
                ssl_handshake_timeout=self._seconds,
                ssl_shutdown_timeout=LINGER_SECONDS,
            )
        )
        await asyncio.sleep(0)  # `start_tls` has set its protocol then, and has not read yet
        if transport.is_closing():
            handshake.cancel()
            raise ConnectionAbortedError("another connection got its place")
        tls = transport.get_protocol()
        assert isinstance(tls, asyncio.BufferedProtocol)
        paced = PacedConnection(transport, tls, self._pacers)
        transport.set_protocol(paced)
        secure = await handshake
        if secure is None or transport.is_closing():  # nothing would tell the server that it has ended
            raise ConnectionAbortedError("it was lost when its handshake was done")
        return secure, paced


class TlsProtocol(asyncio.Protocol):
    """A connection until its handshake is done; the protocol that serves it gets the connection then.

    asyncio's servers call a protocol when its handshake is done, and would bound neither number nor time before.
    """

    transport: asyncio.Transport

    def __init__(self, handshakes: Handshakes, protocol: BoundedProtocol, connections: set[Any]) -> None:
        """connections: those that the server ends when it stops."""
        self._handshakes = handshakes
        self._protocol = protocol
        self._connections = connections
        self._early = b""  # what arrived with the end of the handshake

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        peer = transport.get_extra_info("peername")
        self._address = peer[0] if peer else ""
        place = self._handshakes.counter.add(self._address, transport.abort)
        if place is None:
            transport.abort()
            return
        self._place = place
        self._connections.add(self)
        self._task = asyncio.get_running_loop().create_task(self._complete_handshake())

    def data_received(self, data: bytes) -> None:
        self._early += data

    def shutdown(self) -> None:
        """As uvicorn calls it at a stop."""
        self.transport.abort()

    async def _complete_handshake(self) -> None:
        # Until the handshake's protocol is there to receive. Not in `connection_made`: Python 3.11.2 begins to read
        # after it in spite of a pause. This step runs before the first read.
        self.transport.pause_reading()
        try:
            secure, paced = await self._handshakes.complete(self.transport, self)
        except OSError as error:
            self._handshakes.failed(self._address, error)
            return
        finally:
            self._connections.discard(self)
            self._place.release()
        secure.set_write_buffer_limits(WRITE_BYTES)
        secure.set_read_buffer_limits(READ_BYTES)  # type: ignore[attr-defined]
        secure.set_protocol(self._protocol)
        self._protocol.connection_made(secure, paced)  # counts it again
        if self._early:
            self._protocol.data_received(self._early)


def tls_protocol(
    serving: type[BoundedProtocol], tls: TlsContext, handshake_seconds: float
) -> Callable[..., TlsProtocol]:
    """What makes uvicorn's protocols, in front of those that serve connections."""
    handshakes = Handshakes(tls, serving.counter, handshake_seconds)

    def make(**options: Any) -> TlsProtocol:
        return TlsProtocol(handshakes, serving(**options), options["server_state"].connections)

    return make


def http_protocol(limits: Limits, tls: TlsContext | None = None) -> Callable[..., asyncio.Protocol]:
    """What makes the protocols of one server for uvicorn. tls: None = plain HTTP."""
    serving = bounded_protocol(limits)
    return plain_protocol(serving) if tls is None else tls_protocol(serving, tls, limits.header_seconds)

"""The TLS handshake of a connection, bounded and counted like the connection itself (docs/reliability.md R18)."""

import asyncio
import contextlib
from asyncio.sslproto import SSLProtocol
from typing import Any

from headrace_router.access.tls_files import TlsFiles
from headrace_router.api.http.connection_counter import ConnectionCounter
from headrace_router.api.http.handshake_pacer import HandshakePacer, PacedHandshake
from headrace_router.api.http.protocol import LINGER_SECONDS
from headrace_router.core.limits import Limits

READ_BYTES = 16 << 10  # decrypted per turn of the event loop, and the buffer of each connection
WRITE_BYTES = 64 << 10  # that wait to be encrypted, for a client that does not read


class TlsProtocol(asyncio.Protocol):
    """A connection until its handshake is done; the protocol that serves it gets the connection then.

    asyncio's servers know a connection from the end of its handshake on, and would bound neither number nor time.
    """

    tls: TlsFiles
    limits: Limits
    counter: ConnectionCounter
    pacer: HandshakePacer
    serving: type[asyncio.Protocol]
    transport: asyncio.Transport

    def __init__(self, **options: Any) -> None:
        """options: of uvicorn's protocols, for the one that serves the connection."""
        self._protocol = self.serving(**options)
        self._connections: set[Any] = options["server_state"].connections
        self._early = b""  # what arrived with the end of the handshake

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        peer = transport.get_extra_info("peername")
        self._address = peer[0] if peer else ""
        if not self.counter.add(self._address):
            transport.abort()
            return
        self._connections.add(self)  # a stop of the server ends it
        transport.pause_reading()  # until the handshake's protocol is there to receive
        self._handshake = asyncio.get_running_loop().create_task(self._complete_handshake())

    def data_received(self, data: bytes) -> None:
        self._early += data

    def shutdown(self) -> None:
        """As uvicorn calls it at a stop."""
        self.transport.abort()

    async def _complete_handshake(self) -> None:
        secure: asyncio.Transport | None = None
        try:
            # No TLS, a refused certificate, a timeout: asyncio closes the connection.
            with contextlib.suppress(OSError):
                secure = await self._paced_handshake()
        finally:
            self._connections.discard(self)
            self.counter.remove(self._address)
        if secure is None:  # the client has disconnected
            return
        secure.set_write_buffer_limits(WRITE_BYTES)
        secure.set_read_buffer_limits(READ_BYTES)  # type: ignore[attr-defined]
        secure.set_protocol(self._protocol)
        self._protocol.connection_made(secure)  # counts it again
        if self._early:
            self._protocol.data_received(self._early)

    async def _paced_handshake(self) -> asyncio.Transport | None:
        loop = asyncio.get_running_loop()
        handshake = loop.create_task(
            loop.start_tls(
                self.transport,
                self,
                self.tls.context,
                server_side=True,
                ssl_handshake_timeout=self.limits.header_seconds,
                ssl_shutdown_timeout=LINGER_SECONDS,
            )
        )
        await asyncio.sleep(0)  # `start_tls` has set its protocol then, and has not read yet
        tls = self.transport.get_protocol()
        assert isinstance(tls, asyncio.BufferedProtocol)
        self.transport.set_protocol(PacedHandshake(self.transport, tls, self.pacer))
        secure = await handshake
        self.transport.set_protocol(tls)
        return secure


def tls_protocol(
    serving: type[asyncio.Protocol], tls: TlsFiles, limits: Limits, counter: ConnectionCounter
) -> type[TlsProtocol]:
    """The protocol class for uvicorn, in front of the one that serves a connection. counter: of that one."""
    # By default asyncio allocates and reads 256 KiB per connection; there is no argument for it.
    SSLProtocol.max_size = READ_BYTES
    own: dict[str, Any] = {
        "tls": tls,
        "limits": limits,
        "counter": counter,
        "pacer": HandshakePacer(),
        "serving": serving,
    }
    return type("TlsProtocol", (TlsProtocol,), own)

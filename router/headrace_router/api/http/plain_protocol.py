"""A connection without TLS: what its client sends is paced."""

import asyncio
from collections.abc import Callable

from headrace_router.api.http.protocol import BoundedProtocol
from headrace_router.api.http.read_pacer import PacedConnection, ReadPacers


class PlainProtocol(asyncio.Protocol):
    """A connection without TLS at its beginning; what its client sends is paced."""

    def __init__(self, protocol: BoundedProtocol, pacers: ReadPacers) -> None:
        self._protocol = protocol
        self._pacers = pacers

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        paced = PacedConnection(transport, self._protocol, self._pacers)
        transport.set_protocol(paced)
        self._protocol.connection_made(transport, paced)


def plain_protocol(serving: type[BoundedProtocol]) -> Callable[..., PlainProtocol]:
    """What makes uvicorn's protocols, in front of those that serve connections."""
    pacers = ReadPacers()
    return lambda **options: PlainProtocol(serving(**options), pacers)

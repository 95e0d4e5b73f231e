"""Binds sockets before anything else starts, so that a port in use is reported in one clear sentence."""

import socket
from typing import Any

from headrace_base.address import host_port
from headrace_base.errors import ListenError


class PortReservation:
    """A port for several routers, held by the process that starts them: a bound socket that accepts no connections.

    While it is open, only sockets of the same user that set SO_REUSEPORT, such as the routers' own, can bind the port,
    even when no router is running.
    """

    def __init__(self, host: str, port: int, what: str, flag: str) -> None:
        """Port 0 = any free one. Raises ListenError, which names the port's purpose and the flag that changes it."""
        try:
            self._socket = _reserve(host, port)
        except OSError as error:
            raise listen_error(what, flag, host, port) from error
        self.port = int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Releases the port. Idempotent."""
        self._socket.close()


def _reserve(host: str, port: int) -> socket.socket:
    if port == 0:
        # Only a port that was requested by number stays bound when listening ends.
        chooser, address = stream_socket(host, 0)
        with chooser:
            chooser.bind(address)
            return _reserve(host, int(chooser.getsockname()[1]))
    sock, address = stream_socket(host, port)
    try:
        sock.bind(address)
        # Exclusive first, and by listening: two sockets with SO_REUSEADDR that are only bound do not conflict ...
        sock.listen(1)
        # ... then open for sockets of the same user that set SO_REUSEPORT, and for no others.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        sock.close()
        raise
    return sock


BACKLOG = 2048


def bind_http(host: str, port: int, *, shared: bool = False, flag: str = "--port") -> socket.socket:
    """A listening TCP socket on exactly this address. Port 0 = any free one. Raises ListenError.

    shared: other routers of the cluster listen on it, too; the kernel distributes new connections among them.
    """
    sock, address = stream_socket(host, port)
    try:
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)
        sock.listen(BACKLOG)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise listen_error("HTTP", flag, host, port) from error
    return sock


def stream_socket(host: str, port: int) -> tuple[socket.socket, Any]:
    """A TCP socket, and the address to bind it to. Raises ListenError if `host` is no address of this machine."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError) as error:
        raise ListenError(
            f"'{host}' is no address of this machine: pass an IP address or a name that resolves"
        ) from error
    family, kind, protocol, _, address = found[0]
    sock = socket.socket(family, kind, protocol)
    # A restarted router can bind the port of its predecessor; two running ones still cannot share it.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return sock, address


def listen_error(what: str, flag: str, host: str, port: int) -> ListenError:
    """The sentence for an address that cannot be bound."""
    where = host_port(host, port)
    return ListenError(
        f"cannot listen on {where} for {what}: the port is in use or not allowed; "
        f"choose another with {flag}, or stop what uses it"
    )

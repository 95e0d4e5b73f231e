"""Binds sockets before anything else starts, so that a port in use is reported in one clear sentence."""

import socket
from typing import Any

from headrace_proto.address import host_port
from headrace_proto.errors import ListenError

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

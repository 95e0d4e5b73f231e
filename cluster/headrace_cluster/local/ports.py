"""Checks ports and finds free ones, before `serve` starts any large process."""

import contextlib
import socket
from collections.abc import Collection

from headrace_cluster.program import program_name
from headrace_proto.errors import ListenError

_IN_USE = 98  # EADDRINUSE


def is_taken(host: str, port: int, flag: str) -> bool:
    """Whether `host:port` is in use now; port 0 never is. Raises ListenError if it cannot be bound for another reason.

    No SO_REUSEPORT: with it a second server would share the port without an error.
    """
    error = _bind(host, port) if port else None
    if error is None or error.errno == _IN_USE:
        return error is not None
    raise ListenError(
        f"port {port} on {host} cannot be listened on ({error.strerror}); choose another host, or port with {flag}, "
        f"or see `{program_name()} status`"
    ) from error


def free_port_after(host: str, after: int, count: int, avoid: Collection[int]) -> int:
    """The first of `count` consecutive ports above `after` that are free now and not in `avoid`; else any free port."""
    for first in range(after + 1, 65537 - count):
        row = range(first, first + count)
        if not any(port in avoid for port in row) and not any(_bind(host, port) for port in row):
            return first
    return free_port(host)


def _bind(host: str, port: int) -> OSError | None:
    """The error of listening there; None when it works."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
            probe.listen(1)
        except OSError as error:
            return error
    return None


def free_port(host: str) -> int:
    """A port that is free right now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.bind((host.strip("[]"), 0))
        return int(probe.getsockname()[1])


def reachable(host: str) -> str:
    """The host to which a client on this machine connects for a listener on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}.get(host, host)

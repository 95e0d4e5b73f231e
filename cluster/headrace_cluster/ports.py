"""Ports that `serve` is about to use: found taken before anything heavy starts."""

import contextlib
import socket

from headrace_proto.errors import ListenError


def check_free(host: str, port: int, flag: str) -> None:
    """Raises ListenError if `host:port` cannot be bound now. Port 0 is always free.

    No SO_REUSEPORT: with it a second server would share the port in silence.
    """
    if port == 0:
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), port))
            probe.listen(1)
        except OSError as error:
            reason = "is in use" if error.errno == 98 else f"cannot be listened on ({error.strerror})"
            hint = f"choose another with {flag}" if error.errno == 98 else f"choose another host, or port with {flag}"
            raise ListenError(f"port {port} on {host} {reason}; {hint}, or see `headrace status`") from error


def free_port(host: str) -> int:
    """A port that is free right now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.closing(socket.socket(family, socket.SOCK_STREAM)) as probe:
        probe.bind((host.strip("[]"), 0))
        return int(probe.getsockname()[1])


def host_port(host: str, port: int) -> str:
    """'127.0.0.1:8000', '[::1]:8000'."""
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def reachable(host: str) -> str:
    """Where a client on this machine connects to what listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "[::]": "::1"}.get(host, host)

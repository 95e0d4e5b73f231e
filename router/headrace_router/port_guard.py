"""Keeps one port for several routers that share it: for whoever starts them."""

import socket

from headrace_router.listen import listen_error, stream_socket


class PortGuard:
    """A bound socket that takes no connections.

    While it is held, routers that set SO_REUSEPORT can have the port, and no foreign process can, even when no router
    lives just now.
    """

    def __init__(self, host: str, port: int, what: str, flag: str) -> None:
        """Port 0 = any free one. Raises ListenError, naming what it is for and the flag that changes it."""
        try:
            self._socket = _hold(host, port)
        except OSError as error:
            raise listen_error(what, flag, host, port) from error
        self.port = int(self._socket.getsockname()[1])

    def close(self) -> None:
        """Gives the port back. Idempotent."""
        self._socket.close()


def _hold(host: str, port: int) -> socket.socket:
    if port == 0:
        # Only a port that was asked for by number stays bound when listening ends.
        chooser, address = stream_socket(host, 0)
        with chooser:
            chooser.bind(address)
            return _hold(host, int(chooser.getsockname()[1]))
    sock, address = stream_socket(host, port)
    try:
        sock.bind(address)
        # Exclusive first, and by listening, since two sockets with SO_REUSEADDR that only are bound get along ...
        sock.listen(1)
        # ... then open for sockets of the same user that set SO_REUSEPORT, and for no others.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        sock.close()
        raise
    return sock

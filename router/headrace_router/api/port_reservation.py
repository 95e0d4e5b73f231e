"""Reserves one port for several routers that share it; the process that starts them holds it."""

import socket

from headrace_router.api.listen import listen_error, stream_socket


class PortReservation:
    """A bound socket that accepts no connections.

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

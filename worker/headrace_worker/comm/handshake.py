"""Rank 0's handshake server: connections with the token are accepted, others are closed and delay no accepted one."""

import contextlib
import hmac
import os
import selectors
import socket
import time
from dataclasses import dataclass

from headrace_worker.comm.errors import RendezvousError
from headrace_worker.comm.failure_detection import FailureDetector
from headrace_worker.comm.link import ANSWER, GREETING, Link

_POLL_SECONDS = 0.1
_GREETING_SECONDS = 2.0  # in which a connection must send its whole greeting
_MAX_PENDING = 1024  # connections whose greeting is incomplete


@dataclass(slots=True)
class _PendingConnection:
    connection: socket.socket
    until: float
    received: bytes = b""


class HandshakeServer:
    """Waits for ranks 1 to `size` − 1, and adds their links to the failure detector."""

    def __init__(self, listener: socket.socket, token: bytes, size: int) -> None:
        self._listener = listener
        self._token = token
        self._missing = set(range(1, size))
        self._size = size
        self._pending: dict[int, _PendingConnection] = {}  # by file descriptor
        self._selector = selectors.DefaultSelector()

    def accept_all(self, detector: FailureDetector, seconds: float) -> None:
        """Raises RendezvousError when a rank does not join, RankLostError when a joined rank is lost."""
        self._listener.setblocking(False)
        self._selector.register(self._listener, selectors.EVENT_READ)
        deadline = time.monotonic() + seconds
        try:
            while self._missing:
                detector.check()
                if time.monotonic() > deadline:
                    missing = ", ".join(map(str, sorted(self._missing)))
                    raise RendezvousError(
                        f"of {self._size} ranks these did not join within {seconds:.0f} s: {missing}; see their logs, "
                        "or check for a firewall between the nodes"
                    )
                self._wait(detector)
        finally:
            for pending in list(self._pending.values()):
                self._reject(pending)
            self._selector.close()

    def _wait(self, detector: FailureDetector) -> None:
        for key, _ in self._selector.select(_POLL_SECONDS):
            if key.fileobj is self._listener:
                self._accept()
                continue
            pending = self._pending.get(key.fd)
            link = self._receive(pending) if pending is not None else None
            if link is not None:
                self._missing.discard(link.rank)
                detector.add(link)
        now = time.monotonic()
        for pending in [pending for pending in self._pending.values() if pending.until < now]:
            self._reject(pending)

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError:  # the connection was closed again
            return
        if len(self._pending) >= _MAX_PENDING:
            self._reject(next(iter(self._pending.values())))
        connection.setblocking(False)
        self._pending[connection.fileno()] = _PendingConnection(connection, time.monotonic() + _GREETING_SECONDS)
        self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, pending: _PendingConnection) -> Link | None:
        """The connection's link once its greeting is complete and valid."""
        try:
            data = pending.connection.recv(GREETING.size - len(pending.received))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        pending.received += data
        if data and len(pending.received) < GREETING.size:
            return None
        link = self._authenticate(pending) if data else None
        self._unregister(pending)
        if link is None:
            pending.connection.close()
        return link

    def _authenticate(self, pending: _PendingConnection) -> Link | None:
        presented, rank, pid = GREETING.unpack(pending.received)
        if not hmac.compare_digest(presented, self._token) or rank not in self._missing:
            return None
        try:
            pending.connection.sendall(ANSWER.pack(os.getpid()))
        except OSError:
            return None
        return Link(pending.connection, rank, pid)

    def _unregister(self, pending: _PendingConnection) -> None:
        self._selector.unregister(pending.connection)
        del self._pending[pending.connection.fileno()]

    def _reject(self, pending: _PendingConnection) -> None:
        self._unregister(pending)
        with contextlib.suppress(OSError):
            pending.connection.close()

"""How a rank joins: it sends its number and the token of the rendezvous, and rank 0 answers with its process id.

Other connections are closed without an answer, and delay none.
"""

import contextlib
import os
import selectors
import socket
import struct
import time
from dataclasses import dataclass
from hmac import compare_digest

from headrace_worker.comm.errors import RendezvousError
from headrace_worker.comm.failure_detection import FailureDetector
from headrace_worker.comm.link import Link

_HELLO = struct.Struct("!4sHI32s")  # magic bytes, rank, process id, token
_ANSWER = struct.Struct("!I")  # process id of rank 0
_MAGIC = b"HRR2"
_POLL_SECONDS = 0.1
_HANDSHAKE_SECONDS = 2.0  # in which a connection must send its message
_MAX_PENDING = 1024  # connections whose message is incomplete


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
        self._pending[connection.fileno()] = _PendingConnection(connection, time.monotonic() + _HANDSHAKE_SECONDS)
        self._selector.register(connection, selectors.EVENT_READ)

    def _receive(self, pending: _PendingConnection) -> Link | None:
        """The connection's link once its message is complete and valid."""
        try:
            data = pending.connection.recv(_HELLO.size - len(pending.received))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        pending.received += data
        if data and len(pending.received) < _HELLO.size:
            return None
        link = self._answer(pending) if data else None
        if link is None:
            self._reject(pending)
        return link

    def _answer(self, pending: _PendingConnection) -> Link | None:
        """Answers a missing rank that has the token."""
        magic, rank, pid, token = _HELLO.unpack(pending.received)
        if magic != _MAGIC or not compare_digest(token, self._token) or rank not in self._missing:
            return None
        try:
            pending.connection.sendall(_ANSWER.pack(os.getpid()))
        except OSError:
            return None
        self._unregister(pending)
        return Link(pending.connection, rank, pid)

    def _unregister(self, pending: _PendingConnection) -> None:
        self._selector.unregister(pending.connection)
        del self._pending[pending.connection.fileno()]

    def _reject(self, pending: _PendingConnection) -> None:
        self._unregister(pending)
        with contextlib.suppress(OSError):
            pending.connection.close()


def connect_to_rank_0(host: str, port: int, token: bytes, rank: int, seconds: float) -> Link:
    """Connect this rank to rank 0. Raises RendezvousError."""
    with contextlib.ExitStack() as stack:
        try:
            connection = stack.enter_context(socket.create_connection((host, port), seconds))
            connection.sendall(_HELLO.pack(_MAGIC, rank, os.getpid(), token))
            (pid,) = _ANSWER.unpack(_receive(connection, _ANSWER.size))
        except OSError as error:
            raise RendezvousError(
                f"rank {rank} cannot reach rank 0 at {host}:{port} ({type(error).__name__}); see rank 0's log, or "
                "check for a firewall between the nodes"
            ) from error
        stack.pop_all()
        return Link(connection, 0, pid)


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionResetError
        data += more
    return data

"""Rank 0's handshake server: a connection that proves the token is accepted; others are closed and delay none."""

import contextlib
import os
import selectors
import socket
import time
from dataclasses import dataclass

from headrace_worker.comm.errors import RendezvousError
from headrace_worker.comm.failure_detection import FailureDetector
from headrace_worker.comm.handshake_messages import (
    ANSWER_BYTES,
    CONFIRMATION_BYTES,
    HELLO_BYTES,
    Handshake,
    sign_answer,
    sign_confirmation,
    sign_hello,
    verify_answer,
    verify_confirmation,
    verify_hello,
)
from headrace_worker.comm.link import Link

_POLL_SECONDS = 0.1
_HANDSHAKE_SECONDS = 2.0  # in which a connection must send all its messages
_MAX_PENDING = 1024  # connections whose handshake is incomplete


@dataclass(slots=True)
class _PendingConnection:
    connection: socket.socket
    until: float
    received: bytes = b""
    answered: tuple[Handshake, int, int] | None = None  # with the rank and process id of its Hello

    @property
    def missing(self) -> int:
        """Bytes of the message that it sends next."""
        return (CONFIRMATION_BYTES if self.answered else HELLO_BYTES) - len(self.received)


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
        """The connection's link once its handshake is complete and valid."""
        try:
            data = pending.connection.recv(pending.missing)
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        pending.received += data
        if data and pending.missing:
            return None
        if not data:
            self._reject(pending)
            return None
        message, pending.received = pending.received, b""
        if pending.answered is None:
            if not self._answer(pending, message):
                self._reject(pending)
            return None
        handshake, rank, pid = pending.answered
        confirmed = verify_confirmation(handshake, message)
        if confirmed is None or rank not in self._missing:
            self._reject(pending)
            return None
        self._unregister(pending)
        return Link(pending.connection, rank, pid, confirmed.keys(on_rank_0=True))

    def _answer(self, pending: _PendingConnection, message: bytes) -> bool:
        """Answers a genuine Hello of a missing rank."""
        hello = verify_hello(self._token, message)
        if hello is None or hello[1] not in self._missing:
            return False
        handshake, answer = sign_answer(hello[0], os.getpid())
        pending.answered = handshake, hello[1], hello[2]
        try:
            pending.connection.sendall(answer)
        except OSError:
            return False
        return True

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
            handshake, hello = sign_hello(token, rank, os.getpid())
            connection.sendall(hello)
            answered = verify_answer(handshake, _receive(connection, ANSWER_BYTES))
            if answered is None:
                raise ConnectionAbortedError
            confirmed, confirmation = sign_confirmation(answered[0])
            connection.sendall(confirmation)
        except OSError as error:
            raise RendezvousError(
                f"rank {rank} cannot reach rank 0 at {host}:{port} ({type(error).__name__}); see rank 0's log, or "
                "check for a firewall between the nodes"
            ) from error
        stack.pop_all()
        return Link(connection, 0, answered[1], confirmed.keys(on_rank_0=False))


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionResetError
        data += more
    return data

"""How the ranks of a replica connect: each to rank 0, over a link on which they also share keys and values.

Rank 0 opens the rendezvous; the process that starts the ranks (the `cluster` package, through an authenticated call)
sends the others its address and the token. Rank 0 listens on the replica's interface only. Whoever connects has to
send the token.
"""

import contextlib
import os
import secrets
import selectors
import socket
import struct
import time
from dataclasses import dataclass
from datetime import timedelta
from hmac import compare_digest

from torch._C._distributed_c10d import Store

from headrace_worker.comm.errors import RendezvousError
from headrace_worker.comm.failure_detection import FailureDetector, RankLink
from headrace_worker.core.config import Rendezvous


class RendezvousStore(Store):
    """What the ranks share, as torch's process groups read it. Reads wait until a key is set.

    Its owner keeps a reference for as long as a group uses it: C++ keeps none to this class's methods.
    """

    def __init__(self, detector: FailureDetector) -> None:
        super().__init__()
        self._detector = detector
        self._entries = detector.entries

    def set(self, key: str, value: str | bytes) -> None:
        """Raises RankLostError."""
        self._detector.check()
        self._entries.publish(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        """The value of `key`, once it is set. Raises RankLostError."""
        while (value := self._entries.wait(key, _LOSS_SECONDS)) is None:
            self._detector.check()
        return value

    def read(self, key: str) -> str:
        """The value of `key` as text, once it is set. Raises RankLostError."""
        return self.get(key).decode()

    def check(self, keys: list[str]) -> bool:
        return all(self._entries.find(key) is not None for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Raises RankLostError. `timeout` is not used: a live rank sets its keys, and the loss of one ends the wait."""
        for key in keys:
            self.get(key)

    def delete_key(self, key: str) -> bool:
        """Deletes the key from this rank's copy. Returns whether it was there."""
        found = self._entries.find(key) is not None
        self._entries.discard(key)
        return found


class StoreAllGather:
    """One sequence of all-gathers: all ranks call them in the same order, each rank on one thread at a time.

    Sequences with different names are independent, so that two threads of a rank may each use one.
    """

    def __init__(self, store: RendezvousStore, name: str, rank: int, size: int) -> None:
        self._store = store
        self._name = name
        self._rank = rank
        self._size = size
        self._round = 0

    def gather(self, value: str) -> list[str]:
        """The value of each rank, in rank order. Waits for all ranks; raises RankLostError when one is lost."""
        self._round += 1
        self._store.set(self._key(self._round, self._rank), value)
        values = [self._store.read(self._key(self._round, rank)) for rank in range(self._size)]
        for rank in range(self._size):  # each rank has begun this round, and so has read all of the last one
            self._store.delete_key(self._key(self._round - 1, rank))
        return values

    def _key(self, round_number: int, rank: int) -> str:
        return f"{self._name}-{round_number}-{rank}"


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
    """Waits for ranks 1 to `size` − 1, and adds their links to the failure detector.

    A rank sends its number and the token of the rendezvous; rank 0 answers with its process id. Other connections are
    closed without an answer, and delay no rank.
    """

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

    def _receive(self, pending: _PendingConnection) -> RankLink | None:
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

    def _answer(self, pending: _PendingConnection) -> RankLink | None:
        """Answers a missing rank that has the token."""
        magic, rank, pid, token = _HELLO.unpack(pending.received)
        if magic != _MAGIC or not compare_digest(token, self._token) or rank not in self._missing:
            return None
        try:
            pending.connection.sendall(_ANSWER.pack(os.getpid()))
        except OSError:
            return None
        self._unregister(pending)
        return RankLink(pending.connection, rank, pid)

    def _unregister(self, pending: _PendingConnection) -> None:
        self._selector.unregister(pending.connection)
        del self._pending[pending.connection.fileno()]

    def _reject(self, pending: _PendingConnection) -> None:
        self._unregister(pending)
        with contextlib.suppress(OSError):
            pending.connection.close()


def connect_to_rank_0(host: str, port: int, token: bytes, rank: int, seconds: float) -> RankLink:
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
        return RankLink(connection, 0, pid)


def _receive(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionResetError
        data += more
    return data


JOIN_SECONDS = 120.0
_LOSS_SECONDS = 0.1  # between two looks for a lost rank


class RendezvousHost:
    """Rank 0's listening socket, opened before the other ranks get its address."""

    def __init__(self, host: str) -> None:
        """Listens on `host`, on any free port. Raises RendezvousError."""
        self.listener = _listen(host)
        self.rendezvous = Rendezvous(host, int(self.listener.getsockname()[1]), secrets.token_bytes(32))

    def close(self) -> None:
        """Stop accepting ranks; connected ones stay connected."""
        self.listener.close()


def join_rendezvous(
    rendezvous: Rendezvous,
    rank: int,
    size: int,
    detector: FailureDetector,
    host: RendezvousHost | None = None,
    seconds: float = JOIN_SECONDS,
) -> RendezvousStore:
    """Called by every rank, by rank 0 with its RendezvousHost: from then on the detector monitors the other ranks.

    Raises RendezvousError when a rank does not join, RankLostError when one is lost meanwhile.
    """
    if host is not None:
        try:
            HandshakeServer(host.listener, rendezvous.token, size).accept_all(detector, seconds)
        finally:
            host.close()
    else:
        detector.add(connect_to_rank_0(rendezvous.host, rendezvous.port, rendezvous.token, rank, seconds))
    return RendezvousStore(detector)


def _listen(host: str) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, 0), family=family, backlog=1024)
    except OSError as error:
        raise RendezvousError(f"the ranks cannot listen on {host}: it is not an address of this machine") from error
    return listener

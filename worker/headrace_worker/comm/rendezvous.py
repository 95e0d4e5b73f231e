"""How the ranks of a replica connect: each to rank 0, over a link on which they also share keys and values.

Rank 0 opens the rendezvous; the process that starts the ranks (the `cluster` package, through an authenticated call)
sends the others its address and the token. Rank 0 listens on the replica's interface only. Whoever connects has to
send the token.
"""

import secrets
import socket
from datetime import timedelta

from torch._C._distributed_c10d import Store

from headrace_worker.comm.errors import RendezvousError
from headrace_worker.comm.failure_detection import FailureDetector
from headrace_worker.comm.handshake import HandshakeServer, connect_to_rank_0
from headrace_worker.core.config import Rendezvous

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
        """Of this rank's copy."""
        found = self._entries.find(key) is not None
        self._entries.discard(key)
        return found


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

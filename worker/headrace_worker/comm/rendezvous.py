"""How the ranks of a replica connect: a key-value store on rank 0, and a link from each rank to it.

Rank 0 opens the rendezvous; the process that starts the ranks (the `cluster` package, through an authenticated call)
sends the others its address and the token. Store and links listen on the replica's interface only. The store has no
password, hence its keys have a prefix that only the ranks know; the links require the token.
"""

import secrets
import socket
import time
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore

from headrace_worker.comm.errors import RendezvousError
from headrace_worker.comm.failure_detection import FailureDetector
from headrace_worker.comm.handshake import HandshakeServer
from headrace_worker.comm.link import connect_to_rank_0
from headrace_worker.core.config import Rendezvous

JOIN_SECONDS = 120.0
_POLL_SECONDS = 0.01


class RendezvousHost:
    """Rank 0's listening sockets and store, opened before the other ranks get their address."""

    def __init__(self, host: str) -> None:
        """Listens on `host`, on any free ports. Raises RendezvousError."""
        self.listener = _listen(host)
        store_socket = _listen(host)
        port = int(store_socket.getsockname()[1])
        # The store gets a listening socket: by itself it would listen on every interface.
        self._store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=store_socket.detach()
        )
        self.rendezvous = Rendezvous(host, port, int(self.listener.getsockname()[1]), secrets.token_bytes(32))

    def close(self) -> None:
        """Stop accepting ranks; connected ones stay connected."""
        self.listener.close()


class RendezvousStore:
    """The store, under the rendezvous's prefix."""

    def __init__(self, rendezvous: Rendezvous, detector: FailureDetector) -> None:
        """Raises RendezvousError when the store cannot be reached."""
        self._detector = detector
        try:
            store = TCPStore(
                rendezvous.host, rendezvous.store_port, is_master=False, timeout=timedelta(seconds=JOIN_SECONDS)
            )
        except (RuntimeError, ValueError) as error:
            raise RendezvousError(
                f"the store of rank 0 cannot be reached at {rendezvous.host}:{rendezvous.store_port}; see rank 0's "
                "log, or check for a firewall between the nodes"
            ) from error
        self.store = PrefixStore(rendezvous.token.hex(), store)

    def post(self, key: str, value: str) -> None:
        """Raises RankLostError."""
        try:
            self.store.set(key, value)
        except RuntimeError as error:
            raise self._detector.explain(error) from error

    def read(self, key: str) -> str:
        """The value of `key`, once it is set. Raises RankLostError."""
        try:
            while not self.store.check([key]):
                self._detector.check()
                time.sleep(_POLL_SECONDS)
            return self.store.get(key).decode()
        except RuntimeError as error:
            raise self._detector.explain(error) from error


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
        detector.add(connect_to_rank_0(rendezvous.host, rendezvous.link_port, rendezvous.token, rank, seconds))
    return RendezvousStore(rendezvous, detector)


def _listen(host: str) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, 0), family=family, backlog=1024)
    except OSError as error:
        raise RendezvousError(f"the ranks cannot listen on {host}: it is not an address of this machine") from error
    return listener

"""How the ranks of a replica find each other: a key-value store at rank 0, and a link from each rank to it.

Rank 0 opens the meeting; whoever starts the ranks (the cluster room, through an authenticated call) tells the others
where it is and the token. Store and links listen on the replica's interface only. The store has no password, hence
its keys lie under a prefix that only the ranks know; the links want the token.
"""

import secrets
import socket
import time
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore

from headrace_worker.config import Meeting
from headrace_worker.parallel.door import Door
from headrace_worker.parallel.errors import MeetingError
from headrace_worker.parallel.link import call_rank_0
from headrace_worker.parallel.watch import Watch

JOIN_SECONDS = 120.0
_POLL_SECONDS = 0.01


class MeetingHost:
    """What rank 0 opens before the other ranks are told of it."""

    def __init__(self, host: str) -> None:
        """Listens on `host`, on any free ports. Raises MeetingError."""
        self.listener = _listen(host)
        store_socket = _listen(host)
        port = int(store_socket.getsockname()[1])
        # The store gets a socket that listens already: by itself it would listen on every interface.
        self._store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=store_socket.detach()
        )
        self.meeting = Meeting(host, port, int(self.listener.getsockname()[1]), secrets.token_bytes(32))

    def close(self) -> None:
        """Nobody else may come; those who are here stay."""
        self.listener.close()


class Noticeboard:
    """The store, under the meeting's prefix."""

    def __init__(self, meeting: Meeting, watch: Watch) -> None:
        """Raises MeetingError when the store cannot be reached."""
        self._watch = watch
        try:
            store = TCPStore(meeting.host, meeting.store_port, is_master=False, timeout=timedelta(seconds=JOIN_SECONDS))
        except (RuntimeError, ValueError) as error:
            raise MeetingError(
                f"the store of rank 0 cannot be reached at {meeting.host}:{meeting.store_port}; see rank 0's log, or "
                "whether a firewall stands between the nodes"
            ) from error
        self.store = PrefixStore(meeting.token.hex(), store)

    def post(self, key: str, value: str) -> None:
        """Raises RankLostError."""
        try:
            self.store.set(key, value)
        except RuntimeError as error:
            raise self._watch.explain(error) from error

    def read(self, key: str) -> str:
        """What was posted under `key`, once it is there. Raises RankLostError."""
        try:
            while not self.store.check([key]):
                self._watch.check()
                time.sleep(_POLL_SECONDS)
            return self.store.get(key).decode()
        except RuntimeError as error:
            raise self._watch.explain(error) from error


def meet(
    meeting: Meeting, rank: int, size: int, watch: Watch, host: MeetingHost | None = None, seconds: float = JOIN_SECONDS
) -> Noticeboard:
    """Called by every rank, by rank 0 with its MeetingHost: from then on the watch sees the others.

    Raises MeetingError when somebody does not come, RankLostError when somebody is lost meanwhile.
    """
    if host is not None:
        try:
            Door(host.listener, meeting.token, size).admit(watch, seconds)
        finally:
            host.close()
    else:
        watch.add(call_rank_0(meeting.host, meeting.link_port, meeting.token, rank, seconds))
    return Noticeboard(meeting, watch)


def _listen(host: str) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, 0), family=family, backlog=1024)
    except OSError as error:
        raise MeetingError(f"the ranks cannot meet at {host}: it is not an address of this machine") from error
    return listener

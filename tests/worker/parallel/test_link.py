"""Links between ranks: frames in pieces, closed connections, and the entries that every rank receives over them."""

import socket
import struct
from collections.abc import Iterator

import pytest

from headrace_worker.comm.failure_detection import MAX_PAYLOAD, FrameKind, RankLink, SharedEntries

Pair = tuple[RankLink, RankLink]


@pytest.fixture
def pair() -> Iterator[Pair]:
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    listener.close()
    links = RankLink(near, 1, 11), RankLink(far, 0, 10)
    yield links
    for link in links:
        link.close()


def test_frames_arrive_in_order(pair: Pair) -> None:
    near, far = pair
    near.send(FrameKind.ALIVE)
    near.send_text(FrameKind.FAILED, "rank 1 failed: «too warm»")
    near.send(FrameKind.ENTRY, bytes(range(256)))
    near.send(FrameKind.LEAVING)
    received: list[tuple[FrameKind, bytes]] = []
    while len(received) < 4:
        received += far.read()
    assert received == [
        (FrameKind.ALIVE, b""),
        (FrameKind.FAILED, "rank 1 failed: «too warm»".encode()),
        (FrameKind.ENTRY, bytes(range(256))),
        (FrameKind.LEAVING, b""),
    ]


def test_a_frame_may_arrive_in_pieces(pair: Pair) -> None:
    near, far = pair
    frame = struct.pack("!cI", b"f", 5) + b"sorry"
    for index in range(len(frame)):
        near.socket.sendall(frame[index : index + 1])
        received = far.read()
        assert received == ([(FrameKind.FAILED, b"sorry")] if index == len(frame) - 1 else [])


def test_a_closed_link_is_an_error_on_read_but_not_on_send(pair: Pair) -> None:
    near, far = pair
    near.close()
    with pytest.raises(ConnectionError):
        far.read()
    for _ in range(3):
        far.send(FrameKind.ALIVE)


def test_nothing_follows_a_frame_that_was_sent_in_part(pair: Pair) -> None:
    """The peer could not find the beginning of the next one; without frames it detects a hang."""
    near, far = pair
    for _ in range(20):  # until the socket is full
        near.send(FrameKind.ENTRY, b"x" * MAX_PAYLOAD)
    while far.read():
        pass
    near.send(FrameKind.ALIVE)
    assert far.read() == []


class Ranks:
    """Rank 0 and others, whose links are read on request."""

    def __init__(self) -> None:
        self.entries = [SharedEntries()]
        self._links: list[tuple[SharedEntries, RankLink]] = []

    def add(self) -> SharedEntries:
        """One more rank."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = socket.create_connection(listener.getsockname())
            far, _ = listener.accept()
        own = SharedEntries()
        to_rank_0 = RankLink(near, 0, 10)
        from_rank_0 = RankLink(far, len(self.entries), 11)
        own.attach(to_rank_0)
        self.entries[0].attach(from_rank_0)
        self._links += [(own, to_rank_0), (self.entries[0], from_rank_0)]
        self.entries.append(own)
        return own

    def deliver(self) -> None:
        """Until nothing is on the way."""
        quiet = False
        while not quiet:
            quiet = True
            for entries, link in self._links:
                for kind, payload in link.read():
                    assert kind is FrameKind.ENTRY
                    entries.receive(link, payload)
                    quiet = False

    def close(self) -> None:
        for _, link in self._links:
            link.close()


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


def test_every_rank_receives_an_entry_of_any(ranks: Ranks) -> None:
    first, second = ranks.add(), ranks.add()
    first.publish("a", b"1")
    ranks.entries[0].publish("b", b"2")
    second.publish("c", bytes(range(256)))
    ranks.deliver()
    for entries in ranks.entries:
        assert [entries.find(key) for key in "abc"] == [b"1", b"2", bytes(range(256))]


def test_a_rank_that_joins_later_receives_the_entries_so_far(ranks: Ranks) -> None:
    ranks.add().publish("a", b"1")
    ranks.deliver()
    late = ranks.add()
    ranks.deliver()
    assert late.wait("a", 0) == b"1"


def test_a_discarded_entry_is_gone_on_this_rank_only(ranks: Ranks) -> None:
    own = ranks.add()
    own.publish("a", b"1")
    ranks.deliver()
    own.discard("a")
    assert own.find("a") is None and ranks.entries[0].find("a") == b"1"

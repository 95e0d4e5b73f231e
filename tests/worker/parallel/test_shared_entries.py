"""Entries reach every rank over the links of rank 0, whenever they are set and whenever a rank joins."""

import socket
from collections.abc import Iterator

import pytest

from headrace_worker.comm.link import FrameKind, Link
from headrace_worker.comm.shared_entries import SharedEntries


class Ranks:
    """Rank 0 and others, whose links are read on request."""

    def __init__(self) -> None:
        self.entries = [SharedEntries()]
        self._links: list[tuple[SharedEntries, Link]] = []

    def add(self) -> SharedEntries:
        """One more rank."""
        with socket.create_server(("127.0.0.1", 0)) as listener:
            near = socket.create_connection(listener.getsockname())
            far, _ = listener.accept()
        own = SharedEntries()
        to_rank_0 = Link(near, 0, 10)
        from_rank_0 = Link(far, len(self.entries), 11)
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

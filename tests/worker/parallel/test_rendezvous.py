"""Ranks connect to each other; other connections are closed, and ranks that do not join are named."""

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from headrace_worker.comm.errors import RankLostError, RendezvousError
from headrace_worker.comm.failure_detection import FailureDetector
from headrace_worker.comm.rendezvous import RendezvousHost, RendezvousStore, connect_to_rank_0, join_rendezvous

Detectors = Callable[[int], FailureDetector]


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


@pytest.fixture
def detectors() -> Iterator[Detectors]:
    made: list[FailureDetector] = []

    def make(rank: int) -> FailureDetector:
        made.append(FailureDetector(rank))
        made[-1].start()
        return made[-1]

    yield make
    for detector in made:
        detector.close()


def gather(
    opened: RendezvousHost,
    size: int,
    threads: ThreadPoolExecutor,
    detectors: Detectors,
    seconds: float = 20,
) -> list[Future[RendezvousStore]]:
    hosts = [opened, *[None] * (size - 1)]
    return [
        threads.submit(join_rendezvous, opened.rendezvous, rank, size, detectors(rank), host, seconds)
        for rank, host in enumerate(hosts)
    ]


def connect(port: int, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), 5)
    connection.sendall(data)
    return connection


def is_closed(connection: socket.socket, seconds: float = 5) -> bool:
    connection.settimeout(seconds)
    try:
        return connection.recv(100) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def test_all_join_and_read_values_of_the_others(threads: ThreadPoolExecutor, detectors: Detectors) -> None:
    opened = RendezvousHost("127.0.0.1")
    stores = [future.result(20) for future in gather(opened, 4, threads, detectors)]
    stores[2].set("key", "rank 2")
    assert [store.read("key") for store in stores] == ["rank 2"] * 4


def test_a_rank_that_does_not_join_is_named_and_the_others_are_notified(
    threads: ThreadPoolExecutor, detectors: Detectors
) -> None:
    opened = RendezvousHost("127.0.0.1")
    detector, other = detectors(0), detectors(1)
    first = threads.submit(join_rendezvous, opened.rendezvous, 0, 4, detector, opened, 0.5)
    join_rendezvous(opened.rendezvous, 1, 4, other)
    with pytest.raises(
        RendezvousError, match="of 4 ranks these did not join within 0 s: 2, 3; see their logs"
    ) as raised:
        first.result(5)
    detector.fail(str(raised.value))
    assert "rank 0" in str(other.explain(OSError())) and "did not join" in str(other.failure)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", opened.rendezvous.port), 1)  # no rank can join any more


def test_a_rank_lost_after_it_joined_ends_the_wait_for_the_rest(
    threads: ThreadPoolExecutor, detectors: Detectors
) -> None:
    opened = RendezvousHost("127.0.0.1")
    first = threads.submit(join_rendezvous, opened.rendezvous, 0, 3, detectors(0), opened, 20)
    link = connect_to_rank_0("127.0.0.1", opened.rendezvous.port, opened.rendezvous.token, 1, 5)
    link.close()
    with pytest.raises(RankLostError, match=rf"rank 1 \(process {os.getpid()}\) is lost"):
        first.result(5)


def test_ranks_that_wait_for_the_rest_receive_heartbeats(threads: ThreadPoolExecutor, detectors: Detectors) -> None:
    """Rank 0 sends heartbeats from the first link on: an early rank detects no hang even when strict."""
    opened = RendezvousHost("127.0.0.1")
    first = threads.submit(join_rendezvous, opened.rendezvous, 0, 3, detectors(0), opened, 20)
    early = detectors(1)
    early.enable_hang_detection()
    join_rendezvous(opened.rendezvous, 1, 3, early)
    time.sleep(2.5)
    early.check()
    join_rendezvous(opened.rendezvous, 2, 3, detectors(2))
    first.result(5)


def hello(token: bytes, rank: int = 1, magic: bytes = b"HRR2") -> bytes:
    return struct.pack("!4sHI32s", magic, rank, os.getpid(), token)


HELLOS = {
    "a wrong token": lambda token: hello(bytes(32)),
    "an invalid rank": lambda token: hello(token, 9),
    "rank 0": lambda token: hello(token, 0),
    "another version": lambda token: hello(token, magic=b"HRR1"),
    "HTTP": lambda token: b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: everything there is\r\n\r\n",
}


@pytest.mark.parametrize("sent", HELLOS.values(), ids=list(HELLOS))
def test_connections_without_the_token_are_closed_without_an_answer(
    sent: Callable[[bytes], bytes], threads: ThreadPoolExecutor, detectors: Detectors
) -> None:
    opened = RendezvousHost("127.0.0.1")
    first = threads.submit(join_rendezvous, opened.rendezvous, 0, 2, detectors(0), opened, 20)
    connection = connect(opened.rendezvous.port, sent(opened.rendezvous.token))
    assert is_closed(connection, 1)
    assert not first.done()
    join_rendezvous(opened.rendezvous, 1, 2, detectors(1))
    first.result(5)


def test_an_absent_rank_0_is_a_clear_error(detectors: Detectors) -> None:
    opened = RendezvousHost("127.0.0.1")
    opened.close()
    with pytest.raises(
        RendezvousError, match=r"rank 1 cannot reach rank 0 at 127.0.0.1:\d+ \(ConnectionRefusedError\)"
    ):
        join_rendezvous(opened.rendezvous, 1, 2, detectors(1))

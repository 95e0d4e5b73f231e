"""Ranks find each other; strangers are hung up on, and who does not come is named."""

import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace_worker.parallel.errors import MeetingError, RankLostError
from headrace_worker.parallel.link import GREETING, call_rank_0
from headrace_worker.parallel.meeting import MeetingHost, Noticeboard, meet
from headrace_worker.parallel.watch import Watch


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(16) as pool:
        yield pool


@pytest.fixture
def watches() -> Iterator[Callable[[int], Watch]]:
    made: list[Watch] = []

    def make(rank: int) -> Watch:
        made.append(Watch(rank))
        made[-1].start()
        return made[-1]

    yield make
    for watch in made:
        watch.close()


def gather(
    opened: MeetingHost, size: int, threads: ThreadPoolExecutor, watches: Callable[[int], Watch], seconds: float = 20
) -> list[Future[Noticeboard]]:
    hosts = [opened, *[None] * (size - 1)]
    return [
        threads.submit(meet, opened.meeting, rank, size, watches(rank), host, seconds)
        for rank, host in enumerate(hosts)
    ]


def knock(port: int, said: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), 5)
    connection.sendall(said)
    return connection


def hung_up(connection: socket.socket, seconds: float = 5) -> bool:
    connection.settimeout(seconds)
    try:
        return connection.recv(100) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


def test_all_come_and_read_what_others_post(threads: ThreadPoolExecutor, watches: Callable[[int], Watch]) -> None:
    opened = MeetingHost("127.0.0.1")
    boards = [future.result(20) for future in gather(opened, 4, threads, watches)]
    boards[2].post("who", "rank 2")
    assert [board.read("who") for board in boards] == ["rank 2"] * 4


def test_who_does_not_come_is_named_by_number_and_the_others_hear_of_it(
    threads: ThreadPoolExecutor, watches: Callable[[int], Watch]
) -> None:
    opened = MeetingHost("127.0.0.1")
    watch, other = watches(0), watches(1)
    first = threads.submit(meet, opened.meeting, 0, 4, watch, opened, 0.5)
    meet(opened.meeting, 1, 4, other)
    with pytest.raises(MeetingError, match="of 4 ranks these did not come within 0 s: 2, 3; see their logs") as raised:
        first.result(5)
    watch.fail(str(raised.value))
    assert "rank 0" in str(other.explain(OSError())) and "did not come" in str(other.failure)
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", opened.meeting.link_port), 1)  # nobody may come any more


def test_who_came_and_is_lost_ends_the_waiting_for_the_rest(
    threads: ThreadPoolExecutor, watches: Callable[[int], Watch]
) -> None:
    opened = MeetingHost("127.0.0.1")
    first = threads.submit(meet, opened.meeting, 0, 3, watches(0), opened, 20)
    link = call_rank_0("127.0.0.1", opened.meeting.link_port, opened.meeting.token, 1, 5)
    link.close()
    with pytest.raises(RankLostError, match=rf"rank 1 \(process {os.getpid()}\) is gone"):
        first.result(5)


def test_those_who_wait_for_the_rest_are_kept_company(
    threads: ThreadPoolExecutor, watches: Callable[[int], Watch]
) -> None:
    """Rank 0 gives signs of life from the first link on: who comes early accuses nobody, strict as it may be."""
    opened = MeetingHost("127.0.0.1")
    first = threads.submit(meet, opened.meeting, 0, 3, watches(0), opened, 20)
    early = watches(1)
    early.be_strict()
    meet(opened.meeting, 1, 3, early)
    time.sleep(2.5)
    early.check()
    meet(opened.meeting, 2, 3, watches(2))
    first.result(5)


GREETINGS = {
    "a wrong token": lambda token: GREETING.pack(bytes(32), 1, 1),
    "a rank that is none": lambda token: GREETING.pack(token, 9, 1),
    "rank 0": lambda token: GREETING.pack(token, 0, 1),
    "HTTP": lambda token: b"GET / HTTP/1.1\r\nHost: localhost\r\nAccept: everything there is\r\n\r\n",
}


@pytest.mark.parametrize("greeting", GREETINGS.values(), ids=list(GREETINGS))
def test_strangers_are_hung_up_on_at_once_and_told_nothing(
    greeting: Callable[[bytes], bytes], threads: ThreadPoolExecutor, watches: Callable[[int], Watch]
) -> None:
    opened = MeetingHost("127.0.0.1")
    first = threads.submit(meet, opened.meeting, 0, 2, watches(0), opened, 20)
    stranger = knock(opened.meeting.link_port, greeting(opened.meeting.token))
    assert hung_up(stranger, 1)
    assert not first.done()
    meet(opened.meeting, 1, 2, watches(1))
    first.result(5)


def test_a_second_rank_of_the_same_number_is_hung_up_on(
    threads: ThreadPoolExecutor, watches: Callable[[int], Watch]
) -> None:
    opened = MeetingHost("127.0.0.1")
    first = threads.submit(meet, opened.meeting, 0, 3, watches(0), opened, 20)
    meet(opened.meeting, 1, 3, watches(1))
    with pytest.raises(MeetingError, match="rank 1 cannot reach rank 0"):
        meet(opened.meeting, 1, 3, watches(1))
    meet(opened.meeting, 2, 3, watches(2))
    first.result(5)


def test_many_silent_strangers_hold_nobody_up(threads: ThreadPoolExecutor, watches: Callable[[int], Watch]) -> None:
    opened = MeetingHost("127.0.0.1")
    first = threads.submit(meet, opened.meeting, 0, 2, watches(0), opened, 20)
    strangers = [knock(opened.meeting.link_port, b"x" * (index % 30)) for index in range(100)]
    began = time.monotonic()
    meet(opened.meeting, 1, 2, watches(1))
    first.result(5)
    assert time.monotonic() - began < 1.5
    assert all(hung_up(stranger) for stranger in strangers)


def test_rank_0_that_is_not_there_is_a_sentence(watches: Callable[[int], Watch]) -> None:
    opened = MeetingHost("127.0.0.1")
    opened.close()
    with pytest.raises(MeetingError, match=r"rank 1 cannot reach rank 0 at 127.0.0.1:\d+ \(ConnectionRefusedError\)"):
        meet(opened.meeting, 1, 2, watches(1))


def test_an_address_of_another_machine_is_a_sentence() -> None:
    with pytest.raises(MeetingError, match=r"cannot meet at 192\.0\.2\.1: it is not an address of this machine"):
        MeetingHost("192.0.2.1")


def listening() -> set[tuple[str, int]]:
    """Addresses on which this process listens."""
    inodes = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(os.readlink(entry).removeprefix("socket:[").removesuffix("]"))
        except OSError:
            continue
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and fields[9] in inodes:
                address, port = fields[1].split(":")
                words = [bytes.fromhex(address[at : at + 8])[::-1] for at in range(0, len(address), 8)]
                family = socket.AF_INET if table == "tcp" else socket.AF_INET6
                found.add((socket.inet_ntop(family, b"".join(words)), int(port, 16)))
    return found


def test_a_replica_listens_on_its_interface_alone(
    save_tiny: Callable[..., Path], process_replica: Callable[..., Any]
) -> None:
    """Store, links and gloo. 127.0.0.2 would be another interface."""
    before = listening()
    with process_replica(save_tiny("llama"), 2, 2) as replica:
        mine = listening() - before
        assert mine and {address.removeprefix("::ffff:") for address, _ in mine} == {"127.0.0.1"}
        replica.run([[5, 6, 7]], 2)


def test_rubbish_on_the_stores_port_harms_nobody(
    save_tiny: Callable[..., Path], process_replica: Callable[..., Any]
) -> None:
    before = listening()
    with process_replica(save_tiny("llama"), 2, 1) as replica:
        connections = []
        for _, port in listening() - before:  # the store's, and gloo's if it keeps one open
            for said in (
                b"GET / HTTP/1.1\r\n\r\n",
                bytes(1000),
                os.urandom(4000),
                b"\xff" * 64,
                b"\x09" + struct.pack("<I", 0x3C85F7CE) + b"\x01" + struct.pack("<Q", 2**62),
            ):
                connections.append(knock(port, said))
        threading.Event().wait(0.2)
        replica.run([[5, 6, 7]], 4)
        replica.team.watch.check()


def test_the_token_is_drawn_anew_and_not_shown() -> None:
    one, other = MeetingHost("127.0.0.1").meeting, MeetingHost("127.0.0.1").meeting
    assert len(one.token) == 32 and one.token != other.token
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(one), type=type(one)) == one

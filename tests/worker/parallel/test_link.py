"""Links: frames of any cut, partings, nonsense."""

import socket
from collections.abc import Iterator

import pytest

from headrace_worker.parallel.link import Kind, Link

Pair = tuple[Link, Link]


@pytest.fixture
def pair() -> Iterator[Pair]:
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    listener.close()
    links = Link(near, 1, 11), Link(far, 0, 10)
    yield links
    for link in links:
        link.close()


def test_frames_arrive_in_order(pair: Pair) -> None:
    near, far = pair
    near.send(Kind.ALIVE)
    near.send(Kind.FAILED, "rank 1 failed: «too warm»")
    near.send(Kind.LEAVING)
    heard = []
    while len(heard) < 3:
        heard += far.read()
    assert heard == [(Kind.ALIVE, ""), (Kind.FAILED, "rank 1 failed: «too warm»"), (Kind.LEAVING, "")]


def test_a_frame_may_come_in_pieces(pair: Pair) -> None:
    near, far = pair
    frame = b"f\x00\x05sorry"
    for index in range(len(frame)):
        near.socket.sendall(frame[index : index + 1])
        heard = far.read()
        assert heard == ([(Kind.FAILED, "sorry")] if index == len(frame) - 1 else [])


def test_a_long_text_is_cut_within_what_a_frame_can_say(pair: Pair) -> None:
    near, far = pair
    near.send(Kind.FAILED, "ü" * 100_000)
    heard: list[tuple[Kind, str]] = []
    while not heard:
        heard = far.read()
    assert heard == [(Kind.FAILED, "ü" * 2000)]


@pytest.mark.parametrize("nonsense", [b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00", b"f\x00\x02\xff\xff"])
def test_nonsense_ends_the_link(pair: Pair, nonsense: bytes) -> None:
    near, far = pair
    near.socket.sendall(nonsense)
    with pytest.raises(ConnectionError):
        far.read()


def test_the_end_of_the_other_side_is_an_error_to_read_and_none_to_send(pair: Pair) -> None:
    near, far = pair
    near.close()
    with pytest.raises(ConnectionError):
        far.read()
    for _ in range(3):
        far.send(Kind.ALIVE)


def test_silence_is_nothing(pair: Pair) -> None:
    assert pair[0].read() == []

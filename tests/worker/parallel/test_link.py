"""Links: frames in pieces, closed connections, malformed data."""

import socket
from collections.abc import Iterator

import pytest

from headrace_worker.comm.link import FrameKind, Link

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
    near.send(FrameKind.ALIVE)
    near.send(FrameKind.FAILED, "rank 1 failed: «too warm»")
    near.send(FrameKind.LEAVING)
    received: list[tuple[FrameKind, str]] = []
    while len(received) < 3:
        received += far.read()
    assert received == [(FrameKind.ALIVE, ""), (FrameKind.FAILED, "rank 1 failed: «too warm»"), (FrameKind.LEAVING, "")]


def test_a_frame_may_arrive_in_pieces(pair: Pair) -> None:
    near, far = pair
    frame = b"f\x00\x05sorry"
    for index in range(len(frame)):
        near.socket.sendall(frame[index : index + 1])
        received = far.read()
        assert received == ([(FrameKind.FAILED, "sorry")] if index == len(frame) - 1 else [])


def test_a_long_text_is_truncated_to_what_a_frame_can_hold(pair: Pair) -> None:
    near, far = pair
    near.send(FrameKind.FAILED, "ü" * 100_000)
    received: list[tuple[FrameKind, str]] = []
    while not received:
        received = far.read()
    assert received == [(FrameKind.FAILED, "ü" * 2000)]


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00", b"f\x00\x02\xff\xff"])
def test_malformed_data_ends_the_link(pair: Pair, garbage: bytes) -> None:
    near, far = pair
    near.socket.sendall(garbage)
    with pytest.raises(ConnectionError):
        far.read()


def test_a_closed_link_is_an_error_on_read_but_not_on_send(pair: Pair) -> None:
    near, far = pair
    near.close()
    with pytest.raises(ConnectionError):
        far.read()
    for _ in range(3):
        far.send(FrameKind.ALIVE)


def test_read_without_data_returns_no_frames(pair: Pair) -> None:
    assert pair[0].read() == []

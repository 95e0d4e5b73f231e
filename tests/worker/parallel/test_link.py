"""Links: frames in pieces, closed connections, malformed data."""

import socket
import struct
from collections.abc import Iterator

import pytest

from headrace_worker.comm.link import MAX_PAYLOAD, FrameKind, Link

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

"""Links: frames in pieces, closed connections, malformed, forged and repeated data."""

import socket
import struct
from collections.abc import Iterator

import pytest

from headrace_worker.comm.link import MAX_PAYLOAD, FrameKind, Link
from headrace_worker.comm.link_keys import LinkKeys

Pair = tuple[Link, Link]
NEAR, FAR = b"n" * 32, b"f" * 32


@pytest.fixture
def pair() -> Iterator[Pair]:
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    listener.close()
    links = Link(near, 1, 11, LinkKeys(NEAR, FAR)), Link(far, 0, 10, LinkKeys(FAR, NEAR))
    yield links
    for link in links:
        link.close()


def bytes_of(*frames: tuple[FrameKind, bytes], keys: LinkKeys | None = None) -> list[bytes]:
    """Frames as the near end sends them first."""
    inner, outer = socket.create_server(("127.0.0.1", 0)), socket.socket()
    outer.connect(inner.getsockname())
    accepted, _ = inner.accept()
    link = Link(outer, 1, 11, keys or LinkKeys(NEAR, FAR))
    sent = []
    for kind, payload in frames:
        link.send(kind, payload)
        sent.append(accepted.recv(1 << 16))
    for connection in (inner, outer, accepted):
        connection.close()
    return sent


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
    (frame,) = bytes_of((FrameKind.FAILED, b"sorry"))
    for index in range(len(frame)):
        near.socket.sendall(frame[index : index + 1])
        received = far.read()
        assert received == ([(FrameKind.FAILED, b"sorry")] if index == len(frame) - 1 else [])


def test_a_large_frame_arrives(pair: Pair) -> None:
    near, far = pair
    near.send(FrameKind.ENTRY, b"x" * 200_000)
    received: list[tuple[FrameKind, bytes]] = []
    while not received:
        received = far.read()
    assert received == [(FrameKind.ENTRY, b"x" * 200_000)]


def test_a_long_text_is_truncated(pair: Pair) -> None:
    near, far = pair
    near.send_text(FrameKind.FAILED, "ü" * 100_000)
    received: list[tuple[FrameKind, bytes]] = []
    while not received:
        received = far.read()
    assert received == [(FrameKind.FAILED, ("ü" * 2000).encode())]


FIRST, SECOND = bytes_of((FrameKind.ALIVE, b""), (FrameKind.NOTE, b"second"))
GARBAGE = {
    "another protocol": b"GET / HTTP/1.1\r\n\r\n" + bytes(100),
    "a huge length": struct.pack("!cI", b"a", MAX_PAYLOAD + 1),
    "a wrong MAC": FIRST[:-1] + bytes([FIRST[-1] ^ 1]),
    "a changed kind": b"l" + FIRST[1:],
    "another key": bytes_of((FrameKind.ALIVE, b""), keys=LinkKeys(FAR, NEAR))[0],
    "a repeated frame": FIRST + FIRST,
    "a frame that was left out": SECOND,
    "an unknown kind": bytes_of((FrameKind.ALIVE, b""))[0].replace(b"a", b"?", 1),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=list(GARBAGE))
def test_what_is_not_genuine_ends_the_link(pair: Pair, garbage: bytes) -> None:
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


def test_nothing_follows_a_frame_that_was_sent_in_part(pair: Pair) -> None:
    """The peer could not find the beginning of the next one; without frames it detects a hang."""
    near, far = pair
    for _ in range(20):  # until the socket is full
        near.send(FrameKind.ENTRY, b"x" * MAX_PAYLOAD)
    while far.read():
        pass
    near.send(FrameKind.ALIVE)
    assert far.read() == []


def test_read_without_data_returns_no_frames(pair: Pair) -> None:
    assert pair[0].read() == []

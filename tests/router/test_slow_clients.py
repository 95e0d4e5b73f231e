"""Connections that send or read slowly, or too much, are bounded in time, bytes and number."""

import contextlib
import json
import selectors
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from headrace_router.event_loop import EVENTS_PER_TURN, BoundedSelector

KEY = "a-key-of-a-tenant"
BODY = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 2}).encode()
GET = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"


@pytest.fixture
def connect(harness: Any) -> Iterator[Any]:
    with contextlib.ExitStack() as opened:
        yield lambda: opened.enter_context(socket.create_connection(("127.0.0.1", harness.router.http_port), 5))


def _head(*headers: bytes, path: bytes = b"/v1/completions") -> bytes:
    lines = (b"POST " + path + b" HTTP/1.1", b"host: localhost", b"content-type: application/json", *headers, b"", b"")
    return b"\r\n".join(lines)


def _until_closed(sock: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := sock.recv(1 << 16):
            received += piece
    return received


def _answer(sock: socket.socket) -> bytes:
    """One response with a content-length."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += sock.recv(1 << 16)
    head, _, body = received.partition(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    while len(body) < length:
        body += sock.recv(1 << 16)
    return received


def _connections(harness: Any) -> int:
    return len(harness.router._http._server.server_state.connections)


def test_a_trailer_replaces_no_header(harness: Any, make_replica: Any, connect: Any) -> None:
    harness.start([make_replica()], auth={"keys": [KEY]})
    chunked = _head(b"transfer-encoding: chunked", b"authorization: Bearer wrong")
    body = b"%x\r\n%s\r\n0\r\nauthorization: Bearer %s\r\n\r\n" % (len(BODY), BODY, KEY.encode())
    sock = connect()
    sock.sendall(chunked + body)
    assert _answer(sock).startswith(b"HTTP/1.1 401")
    allowed = chunked.replace(b"wrong", KEY.encode())
    sock = connect()
    sock.sendall(allowed + body.replace(KEY.encode(), b"wrong"))
    assert _answer(sock).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("many", [False, True])
def test_trailers_are_bounded(harness: Any, make_replica: Any, connect: Any, many: bool) -> None:
    harness.start([make_replica()])
    sock = connect()
    sock.sendall(_head(b"transfer-encoding: chunked") + b"%x\r\n%s\r\n0\r\n" % (len(BODY), BODY))
    began, sent = time.monotonic(), 0
    piece = b"a: b\r\n" * 10_000 if many else b"a" * 60_000
    sock.sendall(b"trailer: ")
    with contextlib.suppress(ConnectionError):
        for _ in range(1000):
            sock.sendall(piece)
            sent += len(piece)
    received = b""
    with contextlib.suppress(ConnectionError):
        received = _until_closed(sock)
    assert not received or (received.startswith(b"HTTP/1.1 431") and b"headers_too_large" in received)
    assert time.monotonic() - began < 5
    with harness.client() as client:
        assert client.post("/v1/completions", content=BODY, headers={"content-type": "application/json"}).is_success


def test_a_small_excess_of_trailers_is_answered(harness: Any, make_replica: Any, connect: Any) -> None:
    harness.start([make_replica()], limits={"header_bytes": 1024})
    sock = connect()
    sock.sendall(_head(b"transfer-encoding: chunked") + b"%x\r\n%s\r\n0\r\n" % (len(BODY), BODY))
    time.sleep(0.1)  # what comes together with a piece of the body does not count
    sock.sendall(b"trailer: " + b"a" * 1500)
    received = _until_closed(sock)
    assert received.startswith(b"HTTP/1.1 431") and b"headers_too_large" in received


def test_every_head_is_bounded_in_time(harness: Any, make_replica: Any, connect: Any) -> None:
    harness.start([make_replica()], limits={"header_seconds": 0.3})
    first, second, blank = connect(), connect(), connect()
    first.sendall(b"GET /health HT")
    for sock in (second, blank):
        sock.sendall(GET)
        assert _answer(sock).startswith(b"HTTP/1.1 200")
    second.sendall(b"GET /health HT")
    began = time.monotonic()
    for sock in (first, second):
        assert _until_closed(sock) == b""
    with pytest.raises(ConnectionError):
        while True:
            blank.sendall(b"\r\n")  # ignored before a request
            time.sleep(0.05)
            assert time.monotonic() - began < 3


def test_a_head_in_pieces_beside_an_answer_ends_after_it(harness: Any, make_replica: Any, connect: Any) -> None:
    harness.start([make_replica(first_seconds=1.0)], limits={"header_seconds": 0.2})
    sock = connect()
    sock.sendall(_head(b"content-length: %d" % len(BODY)) + BODY + b"GET /health HT")
    assert _answer(sock).startswith(b"HTTP/1.1 200")
    assert _until_closed(sock) == b""


def test_idle_connections_are_closed(harness: Any, make_replica: Any, connect: Any) -> None:
    harness.start([make_replica()], limits={"idle_seconds": 0.3})
    sock = connect()
    sock.sendall(GET)
    assert _answer(sock).startswith(b"HTTP/1.1 200")
    began = time.monotonic()
    assert _until_closed(sock) == b"" and time.monotonic() - began < 3


def test_a_client_that_does_not_read_is_disconnected(
    harness: Any, make_replica: Any, connect: Any, eventually: Any
) -> None:
    harness.start([make_replica()], limits={"write_seconds": 0.3})
    sock = connect()
    sock.settimeout(0.5)
    with pytest.raises((ConnectionError, TimeoutError)):  # its requests are not read either
        for _ in range(100_000):
            sock.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n")
            time.sleep(0.001)
    eventually(lambda: _connections(harness) == 0)


@pytest.mark.parametrize("last", [b"keep-alive", b"close"])
def test_a_client_that_leaves_a_rest_unread_is_disconnected(
    harness: Any, make_replica: Any, eventually: Any, last: bytes
) -> None:
    """It reads until the transport resumes writing, and no further: nothing else would end the connection."""
    limits = {"write_seconds": 0.5, "idle_seconds": 0.5, "connections": 4}
    harness.start([make_replica()], auth={"keys": [KEY]}, limits=limits)
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG, 536)
        sock.connect(("127.0.0.1", harness.router.http_port))
        eventually(lambda: _connections(harness) == 1)
        (protocol,) = harness.router._http._server.server_state.connections
        protocol.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        protocol.transport.set_write_buffer_limits(high=32 << 10, low=16 << 10)  # for a shorter answer
        body = json.dumps({"model": "tiny", "prompt": ["\x01" * 200] * 128, "echo": True, "max_tokens": 1}).encode()
        headers = (b"content-length: %d" % len(body), b"authorization: Bearer " + KEY.encode(), b"connection: " + last)
        sock.sendall(_head(*headers) + body)
        eventually(lambda: _buffered(harness) > 32 << 10)
        while _buffered(harness) > 16 << 10:
            sock.recv(512)
            time.sleep(0.001)
        assert _buffered(harness)
        eventually(lambda: _connections(harness) == 0)


def _buffered(harness: Any) -> int:
    return sum(each.transport.get_write_buffer_size() for each in harness.router._http._server.server_state.connections)


def test_a_slow_reader_is_not_disconnected(harness: Any, make_replica: Any, connect: Any) -> None:
    harness.start([make_replica()], limits={"write_seconds": 0.3, "prompt_chars": 10**7, "body_bytes": 1 << 24})
    text = "word " * 40
    body = json.dumps({"model": "tiny", "prompt": [text] * 128, "echo": True, "n": 1, "max_tokens": 20}).encode()
    sock = connect()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 14)
    sock.sendall(_head(b"content-length: %d" % len(body), b"connection: close") + body)
    received = b""
    while piece := sock.recv(1 << 13):
        received += piece
        time.sleep(0.002)
    assert received.count(b'"finish_reason"') == 128 and received.endswith((b"}", b"0\r\n\r\n"))


def _opened(connect: Any, count: int) -> list[socket.socket]:
    """Connections whose client may call."""
    opened = [connect() for _ in range(count)]
    for sock in opened:
        sock.sendall(GET)
        assert _answer(sock).startswith(b"HTTP/1.1 200")
    return opened


def test_connections_of_one_address_are_bounded(harness: Any, make_replica: Any, connect: Any, eventually: Any) -> None:
    harness.start([make_replica()], limits={"connections_per_address": 3})
    opened = _opened(connect, 3)
    refused = connect()
    received = _until_closed(refused)
    assert received.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in received and b'"overloaded"' in received
    opened[0].close()
    eventually(lambda: _connections(harness) == 2)
    sock = connect()
    sock.sendall(GET)
    assert _answer(sock).startswith(b"HTTP/1.1 200")


def test_all_connections_are_bounded(harness: Any, make_replica: Any, connect: Any) -> None:
    harness.start([make_replica()], limits={"connections": 2})
    opened = _opened(connect, 2)
    assert _until_closed(connect()).startswith(b"HTTP/1.1 503")
    assert len(opened) == 2


@pytest.mark.parametrize("sent", [b"", b"GET /health HTTP/1.1\r\nhost: loc", GET], ids=["silent", "half", "answered"])
@pytest.mark.parametrize("limit", ["connections", "connections_per_address"])
def test_connections_without_a_key_give_their_places_to_later_ones(
    harness: Any, make_replica: Any, connect: Any, sent: bytes, limit: str
) -> None:
    """So that a probe of health is answered while others hold all places."""
    limits = {limit: 4, "header_seconds": 60.0, "idle_seconds": 60.0}
    harness.start([make_replica()], limits=limits, auth={"keys": [KEY]})
    get_models = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %s\r\n\r\n" % KEY.encode()
    tenant = connect()
    tenant.sendall(get_models)
    assert _answer(tenant).startswith(b"HTTP/1.1 200")
    others = [connect() for _ in range(3)]
    for sock in others:
        sock.sendall(sent)
        assert sent != GET or _answer(sock).startswith(b"HTTP/1.1 200")
    for probes in range(1, 4):
        probe = connect()
        probe.sendall(GET)
        assert _answer(probe).startswith(b"HTTP/1.1 200")
        assert _connections(harness) <= 5 and _until_closed(others[probes - 1]) == b""
    tenant.sendall(get_models)
    assert _answer(tenant).startswith(b"HTTP/1.1 200"), "one that has shown a key keeps its place"


def test_one_key_keeps_half_of_the_connections(harness: Any, make_replica: Any, connect: Any, eventually: Any) -> None:
    other = "a-key-of-another-tenant"
    harness.start([make_replica()], limits={"connections": 4}, auth={"keys": [KEY, other]})

    def get_models(sock: socket.socket, key: str) -> bytes:
        sock.sendall(b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer %s\r\n\r\n" % key.encode())
        return _answer(sock)

    opened = [connect() for _ in range(4)]
    answers = [get_models(sock, KEY) for sock in opened for _ in range(2) if sock not in opened[2:]]
    assert all(answer.startswith(b"HTTP/1.1 200") and b"connection: close" not in answer for answer in answers)
    for sock in opened[2:]:
        answer = get_models(sock, KEY)
        assert answer.startswith(b"HTTP/1.1 200") and b"connection: close" in answer
        eventually(lambda: _connections(harness) < 4)
        free = connect()
        assert b"connection: close" not in get_models(free, other)
    opened[0].close()
    eventually(lambda: _connections(harness) == 3)
    assert b"connection: close" not in get_models(connect(), KEY)


@pytest.mark.parametrize("length", [b"content-length: 1000000000", b"transfer-encoding: chunked"])
def test_the_body_of_a_refused_request_is_not_read(
    harness: Any, make_replica: Any, connect: Any, eventually: Any, length: bytes
) -> None:
    harness.start([make_replica()], auth={"keys": [KEY]})
    sock = connect()
    sock.sendall(_head(length, b"authorization: Bearer wrong"))
    received = _answer(sock)
    assert received.startswith(b"HTTP/1.1 401") and b"connection: close" in received
    began = time.monotonic()
    with pytest.raises(ConnectionError):
        while time.monotonic() - began < 5:
            sock.sendall(b"1\r\na\r\n" * 100)
            time.sleep(0.01)
    eventually(lambda: _connections(harness) == 0)


def test_pipelined_requests_are_bounded(harness: Any, make_replica: Any, connect: Any) -> None:
    harness.start([make_replica(first_seconds=1.0)])
    sock = connect()
    sock.sendall(_head(b"content-length: %d" % len(BODY)) + BODY + GET * 3)
    assert sock.recv(15).startswith(b"HTTP/1.1 200")
    flood = connect()
    flood.sendall(_head(b"content-length: %d" % len(BODY)) + BODY + GET * 1000)
    assert b"200" not in _until_closed(flood)


def test_the_answer_before_a_pipelined_request_ends_with_its_connection(
    harness: Any, make_replica: Any, connect: Any, eventually: Any
) -> None:
    """Else a client could leave generations behind, with their places at the replica."""
    harness.start([make_replica(reply="the quick brown fox " * 100, token_seconds=0.05)])
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 200, "stream": True}).encode()
    sock = connect()
    sock.sendall(_head(b"content-length: %d" % len(body)) + body + GET)
    assert sock.recv(15).startswith(b"HTTP/1.1 200")

    def running() -> int:
        return sum(len(state.attempts) for state in harness.router.services.fleet.replicas)

    assert running() == 1
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close resets the connection
    sock.close()
    eventually(lambda: running() == 0)


def test_a_turn_of_the_event_loop_handles_some_events_and_reaches_all() -> None:
    pairs = [socket.socketpair() for _ in range(3 * EVENTS_PER_TURN)]
    selector = BoundedSelector()
    try:
        for number, (reader, writer) in enumerate(pairs):
            selector.register(reader, selectors.EVENT_READ, number)
            writer.sendall(b"x")
        turns = [selector.select(0) for _ in range(6)]
        assert {len(turn) for turn in turns} == {EVENTS_PER_TURN}
        assert {key.data for turn in turns for key, _ in turn} == set(range(len(pairs))), "events that nobody takes"
        for reader, _ in pairs[10:]:
            selector.unregister(reader)
        assert len(selector.select(0)) == 10
    finally:
        selector.close()
        for pair in pairs:
            for sock in pair:
                sock.close()


def test_a_refused_client_that_has_disconnected_is_no_error(
    harness: Any, make_replica: Any, connect: Any, eventually: Any
) -> None:
    harness.start([make_replica()], limits={"connections": 1})
    (first,) = _opened(connect, 1)
    failures: list[Any] = []
    harness.loop.call_soon_threadsafe(
        harness.loop.set_exception_handler, lambda _loop, context: failures.append(context)
    )
    for _ in range(200):
        sock = socket.create_connection(("127.0.0.1", harness.router.http_port), 5)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # close resets the connection
        sock.close()
    eventually(lambda: _connections(harness) == 1)
    assert not failures and first.fileno() > 0

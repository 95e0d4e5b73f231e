"""Connections that send or read slowly, or too much, are bounded in time, bytes and number."""

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

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


def test_the_request_of_a_client_that_does_not_read_is_freed(
    harness: Any, make_replica: Any, connect: Any, eventually: Any
) -> None:
    harness.start([make_replica()], limits={"write_seconds": 0.3, "prompt_chars": 10**8, "body_bytes": 1 << 24})
    body = {"model": "tiny", "prompt": ["word " * 40] * 128, "echo": True, "n": 1, "max_tokens": 20, "stream": True}
    sock = connect()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)
    content = json.dumps(body | {"return_token_ids": True, "logprobs": 5}).encode()
    sock.sendall(_head(b"content-length: %d" % len(content)) + content)
    eventually(lambda: harness.router.services.admission.running > 0)
    eventually(lambda: harness.router.services.admission.running == 0 and _connections(harness) == 0)


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


def test_connections_are_bounded(harness: Any, make_replica: Any, connect: Any, eventually: Any) -> None:
    harness.start([make_replica()], limits={"connections": 2})
    opened = _opened(connect, 2)
    received = _until_closed(connect())
    assert received.startswith(b"HTTP/1.1 503") and b"retry-after: 1" in received and b'"overloaded"' in received
    opened[0].close()
    eventually(lambda: _connections(harness) == 1)
    _opened(connect, 1)


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


def test_a_disconnect_cancels_a_request_that_another_one_follows(
    harness: Any, make_replica: Any, connect: Any, eventually: Any
) -> None:
    replica = make_replica(token_seconds=0.2)
    harness.start([replica])
    body = json.dumps({"model": "tiny", "prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}).encode()
    sock = connect()
    sock.sendall(_head(b"content-length: %d" % len(body)) + body + GET)
    assert sock.recv(15).startswith(b"HTTP/1.1 200")
    sock.close()
    eventually(lambda: harness.router.services.admission.running == 0 and len(replica.cancels) == 1)


@pytest.mark.parametrize("end", ["half a head", "half-closed"])
def test_a_connection_whose_answers_are_not_read_ends(
    harness: Any, make_replica: Any, eventually: Any, end: str
) -> None:
    """Also where too little waits for the transport to pause."""
    harness.start([make_replica()], limits={"write_seconds": 0.3, "header_seconds": 0.3})
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 12)  # before it connects: the window stays small
    sock.connect(("127.0.0.1", harness.router.http_port))
    connections = harness.router._http._server.server_state.connections
    eventually(lambda: len(connections) == 1)
    (connection,) = connections
    for _ in range(200):
        if connection.transport.get_write_buffer_size():
            break
        answered = harness.router._http._server.server_state.total_requests
        sock.sendall(b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n\r\n")
        eventually(lambda before=answered: harness.router._http._server.server_state.total_requests > before)
    assert connection.transport.get_write_buffer_size() > 0
    sock.sendall(b"GET / HT") if end == "half a head" else sock.shutdown(socket.SHUT_WR)
    eventually(lambda: _connections(harness) == 0)
    sock.close()

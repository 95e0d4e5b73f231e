"""The admin API's server: what a client without the key can send, and for how long (docs/reliability.md R18)."""

import asyncio
import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_cluster.controller.admin import ADMIN_LIMITS, admin_app, admin_server, listen
from headrace_router.access.tls_config import TlsConfig
from headrace_router.access.tls_files import TlsFiles
from headrace_router.api.http.read_pacer import ReadPacer
from support.certificates import Authority

KEY = b"the-key"
HEAD = b"GET /status HTTP/1.1\r\nhost: 127.0.0.1\r\n"
CONNECTIONS = 3
Connect = Callable[[], socket.socket]


@pytest.fixture(params=["plain", "TLS"])
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Connect]:
    """Connects to an admin API with the limits of production, but short in time and few in connections."""
    tls, trust = None, None
    if request.param == "TLS":
        authority = Authority(tmp_path)
        cert, key = authority.issue("server")
        tls, trust = TlsFiles(TlsConfig(cert=cert, key=key)), ssl.create_default_context(cafile=str(authority.file))

    async def nothing() -> None:
        pass

    def open_connection() -> socket.socket:
        plain = socket.create_connection(bound.getsockname(), 5)
        return plain if trust is None else trust.wrap_socket(plain, server_hostname="localhost")

    fewer: dict[str, Any] = {"header_seconds": 0.3, "connections_per_address": CONNECTIONS}
    limits = ADMIN_LIMITS.model_copy(update=fewer)
    bound = listen("127.0.0.1", 0)
    server = admin_server(admin_app(KEY.decode(), lambda: {"replicas": []}, nothing, []), tls, limits)
    running = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])))
    running.start()
    deadline = time.monotonic() + 10
    while not server.started:
        assert time.monotonic() < deadline, "it does not listen"
        time.sleep(0.01)
    yield open_connection
    deadline = time.monotonic() + 10
    while not _request(open_connection, KEY).startswith(b"HTTP/1.1 200"):  # closed connections may still count
        assert time.monotonic() < deadline, "it serves no other client"
    server.should_exit = True
    running.join(5)


def _until_closed(sock: socket.socket) -> bytes:
    received = b""
    with contextlib.suppress(ConnectionError, ssl.SSLError):
        while piece := sock.recv(1 << 16):
            received += piece
    return received


def _request(connect: Connect, key: bytes) -> bytes:
    with connect() as sock:
        sock.sendall(HEAD + b"connection: close\r\nauthorization: Bearer " + key + b"\r\n\r\n")
        return _until_closed(sock)


@pytest.mark.parametrize("headers", [b"a:b\r\n", b"x"], ids=["many", "one"])
@pytest.mark.parametrize("size", [ADMIN_LIMITS.header_bytes, 4 << 20])
def test_headers_are_bounded_before_the_key(connect: Connect, headers: bytes, size: int) -> None:
    received = b""
    with connect() as sock, contextlib.suppress(ConnectionError, ssl.SSLError):
        sock.sendall(HEAD + headers * (size // len(headers)))
        received = _until_closed(sock)
    # A client that goes on sending may have its connection reset.
    assert received.startswith(b"HTTP/1.1 431") or (not received and size > ADMIN_LIMITS.header_bytes)


def test_a_head_is_bounded_in_time(connect: Connect) -> None:
    with connect() as silent, connect() as slow:
        slow.sendall(HEAD)
        assert _until_closed(silent) == _until_closed(slow) == b""


def test_a_refused_client_sends_no_body(connect: Connect) -> None:
    """Its body would have no bound in time."""
    with connect() as sock:
        sock.sendall(b"POST /stop HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-length: 1000000\r\n\r\nx")
        assert _until_closed(sock).startswith(b"HTTP/1.1 401")


def test_what_a_client_sends_is_paced_until_it_has_shown_the_key(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    submit = ReadPacer.submit

    def count(pacer: ReadPacer, client: str, step: Callable[[], None]) -> None:
        steps.append(client)
        submit(pacer, client, step)

    monkeypatch.setattr(ReadPacer, "submit", count)
    with connect() as sock:
        counts = []
        for _ in range(3):
            sock.sendall(HEAD + b"authorization: Bearer " + KEY + b"\r\n\r\n")
            received = b""
            while not received.endswith(b"}"):
                received += sock.recv(1 << 16)
            assert received.startswith(b"HTTP/1.1 200")
            counts.append(len(steps))
    assert counts[0] > 0 and counts[1:] == [counts[0]] * 2


def test_a_client_without_the_key_has_a_second_for_its_head() -> None:
    """Idle connections of local processes would otherwise keep the operator out for longer."""
    assert ADMIN_LIMITS.header_seconds == 1


def test_connections_are_bounded(connect: Connect) -> None:
    received = b""
    with contextlib.ExitStack() as open_ones:
        for _ in range(CONNECTIONS):
            open_ones.enter_context(connect())
        with contextlib.suppress(ConnectionError, ssl.SSLError):  # with TLS, before its handshake
            received = _request(connect, KEY)
    assert not received or received.startswith(b"HTTP/1.1 503")

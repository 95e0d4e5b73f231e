"""The admin API's server: what a client without the key can send, and for how long."""

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
import uvicorn

from headrace_cluster.controller.admin import ADMIN_LIMITS, admin_app, admin_server, listen
from headrace_router.access.tls_config import TlsConfig
from headrace_router.access.tls_files import TlsFiles
from headrace_router.api.http.read_pacer import ReadPacer
from headrace_router.core.limits import Limits
from support.certificates import Authority

KEY = b"the-key"
HEAD = b"GET /status HTTP/1.1\r\nhost: 127.0.0.1\r\n"
CONNECTIONS = 3
Connect = Callable[[], socket.socket]


@pytest.fixture(params=["plain", "TLS"])
def serve(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[Limits], Connect]]:
    """Starts an admin API with some limits; what that returns connects to it."""
    tls, trust = None, None
    if request.param == "TLS":
        authority = Authority(tmp_path)
        cert, key = authority.issue("server")
        tls, trust = TlsFiles(TlsConfig(cert=cert, key=key)), ssl.create_default_context(cafile=str(authority.file))

    with contextlib.ExitStack() as running:

        def start(limits: Limits) -> Connect:
            bound = listen("127.0.0.1", 0)

            def open_connection() -> socket.socket:
                plain = socket.create_connection(bound.getsockname(), 5)
                return plain if trust is None else trust.wrap_socket(plain, server_hostname="localhost")

            server = admin_server(
                admin_app(lambda: [KEY], {"/status": lambda: {"replicas": []}}, lambda: None, []), tls, limits
            )
            thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[bound])))
            thread.start()
            running.callback(_stop, server, thread, open_connection)
            deadline = time.monotonic() + 10
            while not server.started:
                assert time.monotonic() < deadline, "it does not listen"
                time.sleep(0.01)
            return open_connection

        yield start


def _is_served(connect: Connect) -> bool:
    with contextlib.suppress(ConnectionError, ssl.SSLError):  # refused: with TLS, before its handshake
        return _request(connect, KEY).startswith(b"HTTP/1.1 200")
    return False


def _stop(server: uvicorn.Server, thread: threading.Thread, connect: Connect) -> None:
    try:
        deadline = time.monotonic() + 10
        while not _is_served(connect):  # closed connections may still count
            assert time.monotonic() < deadline, "it serves no other client"
    finally:
        server.should_exit = True
        thread.join(5)


@pytest.fixture
def connect(serve: Callable[[Limits], Connect]) -> Connect:
    """To an admin API with the limits of production, but short in time and few in connections."""
    fewer: dict[str, Any] = {"header_seconds": 0.3, "connections_per_address": CONNECTIONS}
    return serve(ADMIN_LIMITS.model_copy(update=fewer))


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


def test_what_a_client_sends_is_paced_apart_once_it_has_shown_the_key(
    connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[ReadPacer] = []
    submit = ReadPacer.submit

    def count(pacer: ReadPacer, client: str, step: Callable[[], None]) -> None:
        steps.append(pacer)
        submit(pacer, client, step)

    monkeypatch.setattr(ReadPacer, "submit", count)
    with connect() as sock:
        pacers = []
        for _ in range(3):
            sock.sendall(HEAD + b"authorization: Bearer " + KEY + b"\r\n\r\n")
            received = b""
            while not received.endswith(b"}"):
                received += sock.recv(1 << 16)
            assert received.startswith(b"HTTP/1.1 200")
            pacers.append(set(steps))
            steps.clear()
    (keyless,) = pacers[0]
    assert pacers[1] == pacers[2] and len(pacers[1]) == 1 and keyless not in pacers[1]


def test_a_client_without_the_key_has_a_second_for_its_head() -> None:
    """Idle connections of local processes would otherwise keep their places for longer."""
    assert ADMIN_LIMITS.header_seconds == 1


def test_connections_are_bounded(connect: Connect) -> None:
    received = b""
    with contextlib.ExitStack() as open_ones:
        for _ in range(CONNECTIONS):
            sock = open_ones.enter_context(connect())
            sock.sendall(HEAD + b"authorization: Bearer " + KEY + b"\r\n\r\n")
            assert sock.recv(12) == b"HTTP/1.1 200"
        with contextlib.suppress(ConnectionError, ssl.SSLError):  # with TLS, before its handshake
            received = _request(connect, KEY)
    assert not received or received.startswith(b"HTTP/1.1 503")


@pytest.mark.parametrize("sent", [b"", HEAD, HEAD + b"\r\n"], ids=["silent", "unfinished head", "no key"])
def test_connections_without_the_key_give_their_places_to_later_ones(serve: Any, sent: bytes) -> None:
    few: dict[str, Any] = {"header_seconds": 60.0, "connections_per_address": CONNECTIONS}
    connect = serve(ADMIN_LIMITS.model_copy(update=few))
    with contextlib.ExitStack() as open_ones:
        opened = [open_ones.enter_context(connect()) for _ in range(CONNECTIONS)]
        for sock in opened:
            sock.sendall(sent)
        for _ in range(2 * CONNECTIONS):
            assert _request(connect, KEY).startswith(b"HTTP/1.1 200")
        assert b"200" not in _until_closed(opened[0]), "the oldest one is closed"


def test_connections_that_are_opened_again_and_again_keep_no_operator_out(serve: Any) -> None:
    """With all limits of production."""
    connect = serve(ADMIN_LIMITS)
    done = threading.Event()

    def flood() -> None:
        """All places are taken again several times a second."""
        with contextlib.ExitStack() as open_ones:
            while not done.wait(0.04):
                for _ in range(ADMIN_LIMITS.connections // 8):
                    sock = open_ones.enter_context(socket.socket())
                    sock.setblocking(False)
                    sock.connect_ex(address)

    with connect() as sock:
        address = sock.getpeername()
    thread = threading.Thread(target=flood)
    thread.start()
    try:
        for _ in range(10):
            began = time.monotonic()
            while True:
                with contextlib.suppress(OSError):  # the machine may be too slow to send the head in time
                    if _request(connect, KEY).startswith(b"HTTP/1.1 200"):
                        break
                assert time.monotonic() - began < 5
            time.sleep(0.05)
    finally:
        done.set()
        thread.join()


def test_an_offer_of_another_protocol_changes_nothing(connect: Connect) -> None:
    key = b"authorization: Bearer " + KEY + b"\r\n\r\n"
    offer = HEAD + b"connection: upgrade\r\nupgrade: h2c\r\ncontent-length: 1\r\n" + key + b"x"
    with connect() as sock:
        sock.sendall(offer + offer + HEAD + b"connection: close\r\n" + key)
        assert _until_closed(sock).count(b"HTTP/1.1 200") == 3

"""Reads are done in slices, one of each client in turn, and each gets all of its bytes."""

import asyncio
import contextlib
import functools
import http.client
import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ParamSpec

import httpx
import pytest

from headrace_router.api.http.read_pacer import (
    OVERHEAD_BYTES,
    READ_BYTES,
    SLICE_SECONDS,
    STEPS_PER_TURN,
    PacedConnection,
    ReadPacer,
    ReadPacers,
)
from support.certificates import Authority
from support.router import key_updates

P = ParamSpec("P")


def on_a_loop(test: Callable[P, Awaitable[None]]) -> Callable[P, None]:
    """Runs an async test."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        async def main() -> None:
            await test(*args, **kwargs)

        asyncio.run(main())

    return run


class Transport:
    """Records whether it is read, and how it ended."""

    def __init__(self, address: str = "192.0.2.1") -> None:
        self.address = address
        self.reading = True
        self.closed = self.aborted = False

    def get_extra_info(self, name: str) -> tuple[str, int]:
        assert name == "peername"
        return self.address, 1

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.aborted = True

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Tls(asyncio.BufferedProtocol):
    """Takes 7 bytes at a time."""

    def __init__(self) -> None:
        self.received = b""
        self.lost: list[Exception | None] = []
        self._buffer = bytearray(7)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        assert not self.lost
        self.received += self._buffer[:nbytes]

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)


def _receive(connection: PacedConnection, data: bytes) -> None:
    connection.get_buffer(-1)[: len(data)] = data
    connection.buffer_updated(len(data))


async def _turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@on_a_loop
async def test_a_turn_has_one_slice_of_steps() -> None:
    pacer, turn = ReadPacer(), 0
    done: list[tuple[int, int]] = []  # (turn, step)

    def step(number: int) -> None:
        time.sleep(0.6 * SLICE_SECONDS)
        done.append((turn, number))

    for number in range(20):
        pacer.submit("a", lambda number=number: step(number))  # type: ignore[misc]
    while len(done) < 20:
        await asyncio.sleep(0)
        turn += 1
    assert [number for _, number in done] == list(range(20))
    turns = [turn for turn, _ in done]
    assert max(turns.count(turn) for turn in turns) <= 2


@on_a_loop
async def test_clients_have_one_step_each_in_turn() -> None:
    pacer, done = ReadPacer(), []
    for name in ("a1", "a2", "a3", "b1", "c1", "b2"):
        pacer.submit(name[0], lambda name=name: done.append(name))  # type: ignore[misc]
    await _turns()
    assert done == ["a1", "b1", "c1", "a2", "b2", "a3"]


@pytest.mark.parametrize(
    ("flooding", "other"), [("192.0.2.1", "192.0.2.2"), ("2001:db8::%x", "2001:db8:0:1::1")], ids=["IPv4", "IPv6"]
)
@on_a_loop
async def test_a_client_waits_for_one_step_of_another_client_with_many_connections(flooding: str, other: str) -> None:
    """Of IPv6 a client is a /64 network."""
    pacers, order = ReadPacers(), []

    class Recorded(asyncio.Protocol):
        def __init__(self, number: int) -> None:
            self.number = number

        def data_received(self, data: bytes) -> None:
            order.append(self.number)

    addresses = [flooding % number if "%" in flooding else flooding for number in range(50)] + [other]
    for number, address in enumerate(addresses):
        transport: Any = Transport(address)
        _receive(PacedConnection(transport, Recorded(number), pacers), b"x")
    await _turns(6)
    assert order == [0, 50, *range(1, 50)]


@on_a_loop
async def test_a_step_that_fails_does_not_hold_up_the_others() -> None:
    loop, reports, done = asyncio.get_running_loop(), [], []
    loop.set_exception_handler(lambda _, context: reports.append(context["exception"]))
    pacer = ReadPacer()

    def fails() -> None:
        raise ValueError

    for step in (fails, lambda: done.append(1), fails, lambda: done.append(2)):
        pacer.submit("a", step)
    await _turns(6)
    assert done == [1, 2] and len(reports) == 2


@on_a_loop
async def test_bytes_of_two_connections_arrive_whole_and_a_connection_waits_for_its_own() -> None:
    pacers = ReadPacers()
    transports: list[Any] = [Transport(), Transport()]
    protocols = [Tls(), Tls()]
    connections = [PacedConnection(t, p, pacers) for t, p in zip(transports, protocols, strict=True)]
    sent = [bytes(range(100)), b"another connection"]
    for connection, data in zip(connections, sent, strict=True):
        _receive(connection, data)  # into one buffer
    assert not any(transport.reading for transport in transports)
    await _turns()
    assert [protocol.received for protocol in protocols] == sent
    assert all(transport.reading for transport in transports)


@pytest.mark.parametrize("has_data", [False, True])
@on_a_loop
async def test_a_connection_without_application_data_is_aborted(has_data: bool) -> None:
    tls, transport = Tls(), Transport()
    connection = PacedConnection(transport, tls, ReadPacers())  # type: ignore[arg-type]
    for _ in range(OVERHEAD_BYTES // READ_BYTES):
        _receive(connection, bytes(READ_BYTES))
        await _turns()
    assert not transport.aborted
    if has_data:
        connection.progressed()
    _receive(connection, b"x")
    await _turns()
    assert transport.aborted is not has_data
    assert len(tls.received) == OVERHEAD_BYTES + has_data


@pytest.mark.parametrize("reason", [None, ConnectionResetError()])
@on_a_loop
async def test_a_connection_that_is_lost_receives_nothing_more(reason: Exception | None) -> None:
    pacers, tls, transport = ReadPacers(), Tls(), Transport()
    connection = PacedConnection(transport, tls, pacers)  # type: ignore[arg-type]
    _receive(connection, b"hello")
    connection.connection_lost(reason)
    await _turns()
    assert tls.received == b"" and tls.lost == [reason]


class Plain(asyncio.Protocol):
    """Records what it receives, and pauses the transport after `most` bytes."""

    def __init__(self, transport: Transport, most: int = 1000) -> None:
        self.received = b""
        self.ended = False
        self._transport = transport
        self._most = most

    def data_received(self, data: bytes) -> None:
        if data == b"fails":
            raise ValueError
        assert not self.ended
        self.received += data
        if len(self.received) >= self._most:
            self._transport.pause_reading()

    def eof_received(self) -> None:
        self.ended = True


def _plain(most: int = 1000) -> tuple[PacedConnection, Any, Plain]:
    transport: Any = Transport()
    protocol = Plain(transport, most)
    return PacedConnection(transport, protocol, ReadPacers()), transport, protocol


@on_a_loop
async def test_a_protocol_that_paused_its_connection_stays_paused() -> None:
    connection, transport, protocol = _plain(most=8)
    _receive(connection, b"1234")
    await _turns()
    assert transport.reading
    _receive(connection, b"5678")
    await _turns()
    assert protocol.received == b"12345678" and not transport.reading


@on_a_loop
async def test_the_end_comes_after_the_bytes() -> None:
    connection, transport, protocol = _plain()
    _receive(connection, b"last")
    assert connection.eof_received()
    assert not transport.closed
    await _turns()
    assert protocol.received == b"last" and protocol.ended and transport.closed


@on_a_loop
async def test_clients_with_a_key_take_turns_by_tenant_beside_those_without() -> None:
    """What has arrived before the key was shown comes before what arrives later."""
    pacers, order = ReadPacers(), []

    class Recorded(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            order.append(data.decode())

    def connect(tenant: str | None) -> PacedConnection:
        transport: Any = Transport()
        connection = PacedConnection(transport, Recorded(), pacers)
        if tenant is not None:
            connection.assign(tenant)
        return connection

    late = connect(None)
    _receive(late, b"before")
    late.assign("a")
    assert late.eof_received()
    for number in range(3):
        _receive(connect(None), b"keyless%d" % number)
        _receive(connect("a"), b"a%d" % number)
    _receive(connect("b"), b"b")
    await _turns()
    assert [name for name in order if name[0] in "ab"] == ["before", "a0", "b", "a1", "a2"]
    assert [name for name in order if name[0] == "k"] == ["keyless0", "keyless1", "keyless2"]
    order.clear()
    _receive(late, b"a")
    for number in range(2 * STEPS_PER_TURN):
        _receive(connect(None), b"keyless%d" % number)
    await _turns(1)
    assert "a" in order and len(order) == 1 + STEPS_PER_TURN


@on_a_loop
async def test_a_turn_has_some_steps_however_short() -> None:
    pacer, done = ReadPacer(), []
    for number in range(3 * STEPS_PER_TURN):
        pacer.submit("a", lambda number=number: done.append(number))  # type: ignore[misc]
    for turn in range(1, 4):
        await _turns(1)
        assert done == list(range(turn * STEPS_PER_TURN))


@on_a_loop
async def test_a_connection_whose_protocol_fails_is_aborted() -> None:
    reports: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context["exception"]))
    connection, transport, _ = _plain()
    _receive(connection, b"fails")
    await _turns()
    assert transport.aborted and len(reports) == 1


class Steps(list[str]):
    """The clients of the steps of all pacers."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        submit = ReadPacer.submit

        def count(pacer: ReadPacer, client: str, step: Callable[[], None]) -> None:
            self.append(client)
            submit(pacer, client, step)

        monkeypatch.setattr(ReadPacer, "submit", count)

    def during(self, call: Callable[[], Any]) -> set[str]:
        self.clear()
        call()
        return set(self)


@pytest.mark.parametrize("encrypted", [False, True], ids=["http", "https"])
def test_a_connection_is_paced_with_those_of_its_tenant_from_its_key_on(
    encrypted: bool, harness: Any, make_replica: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("server")
    tls = {"tls": {"cert": cert, "key": key}} if encrypted else {}
    router = harness.start([make_replica()], auth={"keys": [{"name": "first", "key": "first-key"}]}, **tls)
    steps = Steps(monkeypatch)
    connection: http.client.HTTPConnection = http.client.HTTPConnection("127.0.0.1", router.http_port, 10)
    if encrypted:
        context = ssl.create_default_context(cafile=str(authority.file))
        connection = http.client.HTTPSConnection("127.0.0.1", router.http_port, timeout=10, context=context)

    def get(path: str, headers: dict[str, str]) -> int:
        connection.request("GET", path, headers=headers)
        with connection.getresponse() as response:
            response.read()
            return response.status

    keyed = {"authorization": "Bearer first-key"}
    for _ in range(2):
        for path in ("/v1/models", "/health"):
            assert steps.during(lambda path=path: get(path, {})) == {"127.0.0.1"}  # type: ignore[misc]
    assert "127.0.0.1" in steps.during(lambda: get("/v1/models", keyed))
    for _ in range(2):
        assert steps.during(lambda: get("/v1/models", keyed)) == {"first"}
    assert get("/v1/models", {}) == 401 and get("/v1/models", keyed) == 200
    connection.close()


@pytest.mark.parametrize("encrypted", [False, True], ids=["http", "https"])
def test_a_body_that_follows_the_first_head_arrives_whole(
    encrypted: bool, harness: Any, make_replica: Any, tmp_path: Path
) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("server")
    tls = {"tls": {"cert": cert, "key": key}} if encrypted else {}
    router = harness.start(
        [make_replica(max_model_len=200_000)], auth={"keys": [{"name": "first", "key": "first-key"}]}, **tls
    )
    scheme = "https" if encrypted else "http"
    headers = {"authorization": "Bearer first-key"}
    numbers = list(range(3, 200)) * 400
    for _ in range(3):  # on connections of their own
        body = {"model": "tiny", "prompt": numbers, "max_tokens": 1}
        context = ssl.create_default_context(cafile=str(authority.file))
        url = f"{scheme}://127.0.0.1:{router.http_port}/v1/completions"
        answer = httpx.post(url, json=body, headers=headers, verify=context, trust_env=False, timeout=20)
        assert answer.json()["usage"]["prompt_tokens"] == len(numbers), answer.text
    (submit, *_) = harness.replicas[0].submits
    assert list(submit.prompt_token_ids) == numbers


def test_a_tls_connection_that_only_changes_its_key_is_ended(harness: Any, make_replica: Any, tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    cert, key = authority.issue("server")
    limits = {"header_seconds": 600}
    router = harness.start(
        [make_replica()], auth={"keys": ["first-key"]}, limits=limits, tls={"cert": cert, "key": key}
    )
    connection, secret = key_updates.connect(router.http_port)
    with connection, contextlib.suppress(ConnectionError):
        connection.settimeout(10)
        connection.sendall(key_updates.records(secret, 5_000))
        while connection.recv(1 << 16):
            pass


def test_pipelined_requests_begin_in_the_turns_of_their_client(
    harness: Any, make_replica: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One read may bring several."""
    router = harness.start([make_replica()], auth={"keys": [{"name": "first", "key": "first-key"}]})
    request = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer first-key\r\n\r\n"
    with socket.create_connection(("127.0.0.1", router.http_port), 10) as sock:

        def get(count: int) -> None:
            sock.sendall(count * request)
            received = b""
            while received.count(b'"object":"list"') < count:
                received += sock.recv(1 << 16)

        get(1)
        steps = Steps(monkeypatch)
        assert steps.during(lambda: get(5)) == {"first"} and len(steps) >= 5

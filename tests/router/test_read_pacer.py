"""Reads are done in slices, one of each client in turn, and each gets all of its bytes."""

import asyncio
import functools
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ParamSpec

import httpx
import pytest

from headrace_router.api.http.read_pacer import (
    SLICE_SECONDS,
    STEPS_PER_TURN,
    PacedConnection,
    ReadPacer,
    ReadPacers,
)
from support.certificates import Authority

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
    """Records whether it is read."""

    def __init__(self) -> None:
        self.reading = True

    def get_extra_info(self, name: str) -> tuple[str, int]:
        assert name == "peername"
        return "192.0.2.1", 1

    def close(self) -> None:
        return

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class Tls(asyncio.BufferedProtocol):
    """Takes 7 bytes at a time."""

    def __init__(self) -> None:
        self.received = b""
        self._buffer = bytearray(7)

    def get_buffer(self, sizehint: int) -> bytearray:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self.received += self._buffer[:nbytes]


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

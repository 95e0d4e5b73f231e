"""Handshakes are done in slices, in the order in which clients sent their part, and each gets all of its bytes."""

import asyncio
import functools
import time
from collections.abc import Awaitable, Callable
from typing import Any, ParamSpec

import pytest

from headrace_router.api.http.handshake_pacer import SLICE_SECONDS, HandshakePacer, PacedHandshake

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


def _receive(connection: PacedHandshake, data: bytes) -> None:
    connection.get_buffer(-1)[: len(data)] = data
    connection.buffer_updated(len(data))


async def _turns(count: int = 3) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


@on_a_loop
async def test_a_turn_has_one_slice_of_steps() -> None:
    pacer, turn = HandshakePacer(), 0
    done: list[tuple[int, int]] = []  # (turn, step)

    def step(number: int) -> None:
        time.sleep(0.6 * SLICE_SECONDS)
        done.append((turn, number))

    for number in range(20):
        pacer.submit(lambda number=number: step(number))  # type: ignore[misc]
    while len(done) < 20:
        await asyncio.sleep(0)
        turn += 1
    assert [number for _, number in done] == list(range(20))
    turns = [turn for turn, _ in done]
    assert max(turns.count(turn) for turn in turns) <= 2


@on_a_loop
async def test_a_step_that_fails_does_not_hold_up_the_others() -> None:
    loop, reports, done = asyncio.get_running_loop(), [], []
    loop.set_exception_handler(lambda _, context: reports.append(context["exception"]))
    pacer = HandshakePacer()

    def fails() -> None:
        raise ValueError

    for step in (fails, lambda: done.append(1), fails, lambda: done.append(2)):
        pacer.submit(step)
    await _turns(6)
    assert done == [1, 2] and len(reports) == 2


@on_a_loop
async def test_bytes_of_two_connections_arrive_whole_and_a_connection_waits_for_its_own() -> None:
    pacer = HandshakePacer()
    transports: list[Any] = [Transport(), Transport()]
    protocols = [Tls(), Tls()]
    connections = [PacedHandshake(t, p, pacer) for t, p in zip(transports, protocols, strict=True)]
    sent = [bytes(range(100)), b"another connection"]
    for connection, data in zip(connections, sent, strict=True):
        _receive(connection, data)  # into one buffer
    assert not any(transport.reading for transport in transports)
    await _turns()
    assert [protocol.received for protocol in protocols] == sent
    assert all(transport.reading for transport in transports)


@pytest.mark.parametrize("reason", [None, ConnectionResetError()])
@on_a_loop
async def test_a_connection_that_is_lost_receives_nothing_more(reason: Exception | None) -> None:
    pacer, tls, transport = HandshakePacer(), Tls(), Transport()
    connection = PacedHandshake(transport, tls, pacer)  # type: ignore[arg-type]
    _receive(connection, b"hello")
    connection.connection_lost(reason)
    await _turns()
    assert tls.received == b"" and tls.lost == [reason]

"""A stream ends when either of its directions does, and says why."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from headrace_proto.duplex import both_ways


async def forever() -> None:
    await asyncio.Event().wait()


async def after(seconds: float, then: Callable[[], str]) -> str:
    await asyncio.sleep(seconds)
    return then()


def fail(error: Exception) -> Callable[[], str]:
    def then() -> str:
        raise error

    return then


async def silent(work: Awaitable[str]) -> None:
    await work


def test_the_reader_says_how_it_ends() -> None:
    assert asyncio.run(both_ways(after(0, lambda: "end"), forever())) == "end"
    with pytest.raises(KeyError):
        asyncio.run(both_ways(after(0, fail(KeyError())), forever()))


def test_a_writer_that_dies_ends_the_stream() -> None:
    with pytest.raises(ValueError, match="out of range"):
        asyncio.run(both_ways(forever(), silent(after(0, fail(ValueError("out of range"))))))
    with pytest.raises(ConnectionError):
        asyncio.run(both_ways(forever(), silent(after(0, lambda: ""))))


def test_the_reader_knows_better_why_a_call_ended() -> None:
    with pytest.raises(KeyError):
        asyncio.run(both_ways(after(0.02, fail(KeyError())), silent(after(0, fail(ValueError())))))


def test_both_are_over_when_it_is_cancelled() -> None:
    ended: list[str] = []

    async def until_cancelled(name: str) -> None:
        try:
            await forever()
        finally:
            ended.append(name)

    async def main() -> None:
        task = asyncio.create_task(both_ways(until_cancelled("reader"), until_cancelled("writer")))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert sorted(ended) == ["reader", "writer"]

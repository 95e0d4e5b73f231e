"""A stream ends when one of its directions ends, with the reason."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from headrace_proto.duplex import run_duplex


async def forever() -> None:
    await asyncio.Event().wait()


async def after(seconds: float, then: Callable[[], str]) -> str:
    await asyncio.sleep(seconds)
    return then()


def fail(error: Exception) -> Callable[[], str]:
    def then() -> str:
        raise error

    return then


async def discard_result(work: Awaitable[str]) -> None:
    await work


def test_the_result_is_the_readers() -> None:
    assert asyncio.run(run_duplex(after(0, lambda: "end"), forever())) == "end"
    with pytest.raises(KeyError):
        asyncio.run(run_duplex(after(0, fail(KeyError())), forever()))


def test_a_failed_writer_ends_the_stream() -> None:
    with pytest.raises(ValueError, match="out of range"):
        asyncio.run(run_duplex(forever(), discard_result(after(0, fail(ValueError("out of range"))))))
    with pytest.raises(ConnectionError):
        asyncio.run(run_duplex(forever(), discard_result(after(0, lambda: ""))))


def test_a_cancel_ends_both() -> None:
    ended: list[str] = []

    async def until_cancelled(name: str) -> None:
        try:
            await forever()
        finally:
            ended.append(name)

    async def main() -> None:
        task = asyncio.create_task(run_duplex(until_cancelled("reader"), until_cancelled("writer")))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert sorted(ended) == ["reader", "writer"]

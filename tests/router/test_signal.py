"""The signal that wakes the reader of a stream."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from headrace_router.dispatch.signal import Signal


def _run(scenario: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(scenario, 10))


def test_each_wait_ends_with_one_or_more_sets() -> None:
    async def scenario() -> None:
        signal = Signal()
        signal.set()
        signal.set()
        assert await signal.wait()
        for seconds in (None, 5.0):
            asyncio.get_running_loop().call_later(0.01, signal.set)
            assert await signal.wait(seconds)
        signal.close()

    _run(scenario())


def test_a_wait_ends_after_its_own_seconds() -> None:
    async def scenario() -> None:
        loop, signal = asyncio.get_running_loop(), Signal()
        for _ in range(5):  # the timer of the first wait is due during a later one
            loop.call_later(0.06, signal.set)
            assert await signal.wait(0.2)
        assert not await signal.wait(0.2)
        assert not await signal.wait(0.2)
        signal.set()
        assert await signal.wait(0.2)

    _run(scenario())


def test_a_wait_that_was_cancelled_leaves_nothing() -> None:
    async def scenario() -> None:
        signal = Signal()
        waiting = asyncio.create_task(signal.wait(0.05))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        await asyncio.sleep(0.1)  # its timer finds no wait
        signal.set()
        assert await signal.wait(0.05)
        waiting = asyncio.create_task(signal.wait(0.05))
        await asyncio.sleep(0)
        signal.close()
        await asyncio.sleep(0.1)
        assert not waiting.done(), "its timer is cancelled"
        signal.set()
        assert await waiting

    _run(scenario())

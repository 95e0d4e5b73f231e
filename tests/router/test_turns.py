"""No request holds the event loop with what it has put off, and none waits for all of another one's."""

import asyncio
import time
from functools import partial

import pytest

from headrace_router.dispatch import turns as module
from headrace_router.dispatch.turns import Turns


def test_calls_of_requests_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICE_SECONDS", 60)
    called: list[str] = []

    async def main() -> None:
        turns = Turns()
        for number in range(4):
            turns.soon("large", lambda number=number: called.append(f"large {number}"))  # type: ignore[misc]
        turns.soon("small", lambda: called.append("small"))
        cancel = turns.soon("gone", lambda: called.append("gone"))
        cancel()
        assert not called, "not within the call"
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert called == ["large 0", "small", "large 1", "large 2", "large 3"]


def test_others_run_between_slices() -> None:
    """128 calls of 2 ms each: a task that only yields is never kept from running for more than a few of them."""
    longest = 0.0
    done: list[int] = []

    def slow(number: int) -> None:
        time.sleep(0.002)
        done.append(number)

    async def main() -> None:
        nonlocal longest
        turns = Turns()
        for number in range(128):
            turns.soon("n", partial(slow, number))
        turn = 0
        while len(done) < 128:
            before = len(done)
            await asyncio.sleep(0)
            turn += 1
            longest = max(longest, len(done) - before)
        assert turn > 32

    asyncio.run(main())
    assert longest <= 4 and done == list(range(128))


def test_a_call_that_raises_does_not_end_the_others() -> None:
    called: list[int] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)
        turns = Turns()
        turns.soon("a", lambda: 1 / 0)  # type: ignore[arg-type, return-value]
        turns.soon("b", lambda: called.append(1))
        turns.soon("a", lambda: called.append(2))
        await asyncio.sleep(0.01)

    asyncio.run(main())
    assert sorted(called) == [1, 2]

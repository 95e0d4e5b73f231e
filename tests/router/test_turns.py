"""The deferred calls of several requests take turns."""

import asyncio

import pytest

from headrace_router.dispatch import running_request as module
from headrace_router.dispatch.running_request import Turns


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

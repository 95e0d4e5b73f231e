"""Blocking calls of Ray: while one hangs the event loop goes on, and calls behind it are not made."""

import asyncio
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from headrace_cluster.ray.calls import RayCalls, RayHangsError


def test_a_call_that_hangs_fails_in_time_and_so_do_those_behind_it() -> None:
    release, made = threading.Event(), list[str]()

    def hang() -> str:
        release.wait(30)
        made.append("hung")
        return "late"

    async def scenario() -> None:
        calls = RayCalls(seconds=0.2)
        assert await calls.run(lambda: "at once") == "at once"
        results = await asyncio.gather(*map(calls.run, (hang, lambda: made.append("behind"))), return_exceptions=True)
        assert [type(result) for result in results] == [RayHangsError, RayHangsError]
        with pytest.raises(RayHangsError, match=r"not answered within 0\.2 s"):
            await calls.run(lambda: made.append("while it hangs"))
        release.set()
        assert await calls.run(lambda: "again") == "again"

    asyncio.run(scenario())
    assert made == ["hung"], "what nobody waits for any more is not done later"


def test_a_call_that_hangs_does_not_keep_the_process() -> None:
    code = """
import asyncio, time
from headrace_cluster.ray.calls import RayCalls
asyncio.run(RayCalls(0.1).run(time.sleep, 600))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1 and "Ray has not answered within 0.1 s" in done.stderr


def test_a_call_is_not_made_unless_the_check_before_it_succeeds() -> None:
    made: list[str] = []

    def refuse() -> None:
        raise PermissionError("another controller acts")

    async def scenario(before: Callable[[], object] | None) -> None:
        calls = RayCalls()
        calls.before = before
        await calls.run(made.append, "made")

    with pytest.raises(PermissionError):
        asyncio.run(scenario(refuse))
    assert made == []
    asyncio.run(scenario(None))
    assert made == ["made"]

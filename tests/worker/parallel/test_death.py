"""A rank is killed or fails: every other one ends by itself within two seconds (five if it hangs), and names it."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SECONDS = 2.0
HANG_SECONDS = 5.0
SHARED = Path("/dev/shm")
Make = Callable[..., Any]
Record = Callable[[str, object], None]


@pytest.fixture(autouse=True)
def no_shared_memory_is_left() -> Any:
    """No shared memory of a test is left, however its ranks ended."""
    before = set(SHARED.iterdir())
    yield
    assert not [entry for entry in set(SHARED.iterdir()) - before if "headrace" in entry.name]


def signal_rank(group: Any, rank: int, how: signal.Signals) -> list[float]:
    """Signals a rank; returns the seconds until each other one has exited. All of them must name it."""
    victim = group.pids[rank]
    started = time.monotonic()
    os.kill(victim, how)
    others = [pid for pid in group.pids if pid != victim]
    for pid in others:
        said = group.fork_server.ended(pid, 10)
        assert f"rank {rank} (process {victim})" in said, said
        group.fork_server.wait_for(pid, "exited", 6)
    if how is signal.SIGKILL:
        group.fork_server.wait_for(victim, "exited", 6)
    return [group.fork_server.when(pid, "exited") - started for pid in others]


def check_times(seconds: list[float], record: Record, limit: float = SECONDS) -> None:
    name = os.environ["PYTEST_CURRENT_TEST"].split("::")[-1].removesuffix(" (call)")
    record(name, f"{max(seconds):.2f} s")
    assert min(seconds) > 0, "it ended before the signal"
    assert max(seconds) <= limit


IDLE, BUSY = "idle", "in steps"


@pytest.mark.parametrize(
    ("tp", "pp", "rank", "state"),
    [
        *((2, 1, rank, state) for rank in (0, 1) for state in (IDLE, BUSY)),
        *((1, 2, rank, state) for rank in (0, 1) for state in (IDLE, BUSY)),
        *((2, 2, rank, BUSY) for rank in (0, 1, 2, 3)),
        (2, 2, 1, IDLE),
    ],
)
def test_a_killed_rank(
    tp: int, pp: int, rank: int, state: str, rank_group: Make, record_testsuite_property: Record
) -> None:
    group = rank_group(tp, pp)
    group.start(busy=state == BUSY)
    group.ready()
    time.sleep(0.3)
    check_times(signal_rank(group, rank, signal.SIGKILL), record_testsuite_property)


@pytest.mark.parametrize(
    ("tp", "pp", "rank", "state"), [(2, 1, 0, IDLE), (2, 1, 1, BUSY), (1, 2, 1, IDLE), (2, 2, 0, BUSY), (2, 2, 2, BUSY)]
)
def test_a_stopped_rank(
    tp: int, pp: int, rank: int, state: str, rank_group: Make, record_testsuite_property: Record
) -> None:
    group = rank_group(tp, pp)
    group.start(busy=state == BUSY)
    group.ready()
    time.sleep(0.3)
    check_times(signal_rank(group, rank, signal.SIGSTOP), record_testsuite_property, HANG_SECONDS)
    # Once it continues, it detects that the others are lost and ends too.
    os.kill(group.pids[rank], signal.SIGCONT)
    group.fork_server.wait_for(group.pids[rank], "exited", HANG_SECONDS + 1)


@pytest.mark.parametrize(
    ("stage", "rank"),
    [("building the model", 0), ("building the model", 3), ("sizing the KV cache", 1), ("sizing the KV cache", 2)],
)
def test_a_rank_killed_while_it_loads(
    stage: str, rank: int, rank_group: Make, record_testsuite_property: Record
) -> None:
    """The others are ahead of it, and wait for it in calls that no library would end."""
    group = rank_group(2, 2)
    group.start(holds={rank: stage})
    group.reach(rank, stage)
    time.sleep(0.3)
    check_times(signal_rank(group, rank, signal.SIGKILL), record_testsuite_property)


def test_a_rank_killed_while_others_have_not_joined(rank_group: Make, record_testsuite_property: Record) -> None:
    group = rank_group(2, 2)
    group.start(absent=[3])
    group.await_members(2)
    time.sleep(0.3)
    check_times(signal_rank(group, 1, signal.SIGKILL), record_testsuite_property)


@pytest.mark.parametrize(("tp", "pp", "rank"), [(2, 1, 1), (2, 2, 3)])
def test_an_exception_in_a_followers_step(tp: int, pp: int, rank: int, rank_group: Make) -> None:
    """Only its type is reported: an exception's message may contain paths or prompts."""
    group = rank_group(tp, pp)
    group.start(busy=True, faults={rank: 20})
    for pid in group.pids:
        said = group.fork_server.ended(pid, 20)
        assert f"rank {rank} (process {group.pids[rank]}) failed: FloatingPointError in a step" in said
        group.fork_server.wait_for(pid, "exited", SECONDS)
    ends = [group.fork_server.when(pid, "exited") for pid in group.pids]
    assert max(ends) - min(ends) <= SECONDS


def test_tokens_that_cannot_be_read_on_the_rank_that_samples(rank_group: Make) -> None:
    """It reads them on another thread than its steps, which waits for the next command meanwhile."""
    group = rank_group(1, 2)
    group.start(busy=True, unread={1: 20})
    for pid in group.pids:
        said = group.fork_server.ended(pid, 20)
        assert f"rank 1 (process {group.pids[1]}) failed: FloatingPointError in a step" in said
        group.fork_server.wait_for(pid, "exited", SECONDS)


def test_a_rank_that_leaves_before_the_others(rank_group: Make) -> None:
    """Stopped in an orderly way, but not by rank 0: the others cannot continue without it."""
    group = rank_group(2, 2)
    group.start()
    group.ready()
    leaver = group.pids.pop(2)
    os.kill(leaver, signal.SIGUSR1)  # stops a rank of the fork server
    group.fork_server.wait_for(leaver, "exited", 8)
    for pid in group.pids:
        assert f"rank 2 (process {leaver}) left before the others" in group.fork_server.ended(pid, 3)
        group.fork_server.wait_for(pid, "exited", 3)
        assert group.fork_server.when(pid, "exited") - group.fork_server.when(leaver, "ended") <= SECONDS

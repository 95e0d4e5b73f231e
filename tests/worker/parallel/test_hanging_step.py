"""A step that does not end although all ranks live: all of them end, within a bound that its prediction gives."""

import time
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from headrace_worker.assembly.step_watch import FACTOR, LEAST_TICKS, TICK_SECONDS, StepWatch
from headrace_worker.comm import group as group_module
from headrace_worker.comm.failure_detection import FailureDetector
from headrace_worker.comm.group import device_group

BOUND = LEAST_TICKS * TICK_SECONDS + 2.0


@pytest.mark.parametrize(("tp", "pp", "rank"), [(2, 1, 0), (2, 1, 1), (1, 2, 1), (2, 2, 2)])
def test_every_rank_ends(
    tp: int, pp: int, rank: int, rank_group: Callable[..., Any], record_testsuite_property: Callable[..., None]
) -> None:
    group = rank_group(tp, pp)
    group.start(busy=True, hangs={rank: 20})
    group.ready()
    group.reach(rank, "hanging")
    hung = time.monotonic()
    for pid in group.pids:
        said = group.fork_server.ended(pid, BOUND)
        assert "a step hangs: it has not ended for" in said and "were predicted" in said, said
    seconds = [group.fork_server.when(pid, "ended") - hung for pid in group.pids]
    record_testsuite_property(f"{tp}x{pp}-{rank}", f"{max(seconds):.2f} s")
    assert max(seconds) < BOUND


def _ticks(watch: StepWatch) -> int:
    """Until a step counts as hanging."""
    for count in range(1, 10_000):
        if watch.tick():
            return count
    raise AssertionError("it never did")


def test_the_bound_follows_the_prediction() -> None:
    predicted = 0.01
    watch = StepWatch(lambda: predicted, lambda why: None)
    assert not any(watch.tick() for _ in range(2 * LEAST_TICKS)), "no step runs"
    watch.begin()
    assert _ticks(watch) == LEAST_TICKS + 1
    predicted = 3.0
    watch.begin()
    assert _ticks(watch) == FACTOR * predicted / TICK_SECONDS + 1
    watch.begin()
    for _ in range(10):
        assert not any(watch.tick() for _ in range(LEAST_TICKS))
        watch.end()
        watch.begin()
    watch.end()
    assert not any(watch.tick() for _ in range(2 * LEAST_TICKS)), "the last one has ended"


class FakeNccl:
    """The calls of torch's NCCL backend that start and end a group."""

    class Options:
        _timeout = timedelta(0)

    def __init__(self, store: object, rank: int, size: int, options: object) -> None:
        self.aborted = 0

    def eager_connect_single_device(self, device: torch.device) -> None:
        assert device.index is not None

    def abort(self) -> None:
        self.aborted += 1
        raise RuntimeError("NCCL error: it is in error already")


def test_nccl_is_aborted_when_a_rank_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    dist: Any = SimpleNamespace(is_nccl_available=lambda: True, ProcessGroupNCCL=FakeNccl)
    monkeypatch.setattr(group_module, "dist", dist)
    monkeypatch.setattr(group_module, "PrefixStore", lambda name, store: store)
    monkeypatch.setattr(group_module, "ABORT_SECONDS", 0.3)
    detector, store = FailureDetector(0), Any
    groups = [device_group(store, name, torch.device("cuda", 0), 0, 2, detector) for name in ("pipe", "stage-0")]  # type: ignore[arg-type]
    assert [group._backend.aborted for group in groups] == [0, 0]
    detector.fail("a step hangs")
    assert [group._backend.aborted for group in groups] == [0, 0], "the other ranks do not know of it yet"
    deadline = time.monotonic() + 5
    while [group._backend.aborted for group in groups] != [1, 1]:
        assert time.monotonic() < deadline
        time.sleep(0.01)

"""Windows of recorded steps: bounds, refusals, failures, with a fake clock, without torch; then a trace of torch."""

import gzip
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.plan import StepPlan, Work
from headrace_worker.profiling.profiler import StepProfiler, Window, make_profiler
from headrace_worker.profiling.recorder import top_operators
from headrace_worker.profiling.report import Operator, ProfileFailedError, ProfileRefusedError
from headrace_worker.profiling.stepping import ProfiledRunner
from support.worker.engine_bench import make_bench

STEP_SECONDS = 0.5
IDLE = StepPlan(0, [], [], [], [])


@dataclass
class FakeRecorder:
    """Takes `pause` seconds per step to stop; raises where configured."""

    bench: "Bench"
    marks: list[str] = field(default_factory=list)
    running: bool = False

    def start(self) -> None:
        self.bench.fail("start")
        assert not self.running
        self.running = True

    def stop(self) -> None:
        assert self.running
        self.running = False
        self.bench.now += self.bench.pause * len(self.marks)
        self.bench.fail("stop")

    @contextmanager
    def mark(self, name: str) -> Iterator[None]:
        assert self.running
        self.bench.fail("mark")
        self.marks.append(name)
        yield
        self.bench.fail("unmark")

    def write(self, path: Path) -> list[Operator]:
        assert not self.running
        self.bench.fail("write")
        path.write_text("\n".join(self.marks))
        return [Operator("aten::mm", len(self.marks), 1.0, 1.0, False)]


class Bench:
    """A profiler on a clock that moves half a second per step."""

    def __init__(self, folder: Path) -> None:
        self.now = 100.0
        self.pause = 0.001
        self.failing = ""
        self.made: list[FakeRecorder] = []
        self.profiler = StepProfiler(folder, "m-0-g1-r0", self.make, lambda: self.now, lambda: datetime.now(UTC))
        self.number = 0

    def make(self) -> FakeRecorder:
        self.fail("make")
        self.made.append(FakeRecorder(self))
        return self.made[-1]

    def fail(self, where: str) -> None:
        if where == self.failing:
            raise RuntimeError(f"cannot {where}")

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.number += 1
            with self.profiler.step(StepPlan(self.number, [], [], [], [Work(0, 5, 3, True)])):
                self.now += STEP_SECONDS

    def idle_step(self) -> None:
        with self.profiler.step(IDLE):
            pass


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


def _marks(window: Window) -> list[str]:
    return Path(window.wait(5).path).read_text().splitlines()


def test_a_window_holds_the_steps_after_the_first(bench: Bench) -> None:
    bench.steps(2)
    assert not bench.made, "no recorder is created before a request"
    window = bench.profiler.open(3, 60)
    bench.steps(10)
    assert _marks(window) == [f"step {number}: 1 request, 3 tokens" for number in (4, 5, 6)]
    report = window.wait(0)
    assert (report.steps, report.note) == (3, "")
    assert report.seconds == pytest.approx(3 * STEP_SECONDS)
    assert Path(report.path).name.startswith("m-0-g1-r0-2") and report.path.endswith(".trace.json.gz")
    assert len(bench.made) == 2 and not any(recorder.running for recorder in bench.made)


def test_a_window_ends_at_its_deadline(bench: Bench) -> None:
    window = bench.profiler.open(1000, 2.2)
    bench.steps(10)
    assert window.wait(5).steps == 4  # the fifth step, probe included, ends after the deadline
    window = bench.profiler.open(1000, 0.1)
    bench.steps(1)
    report = window.wait(5)
    assert (report.steps, "one step" in report.note) == (1, True)


@pytest.mark.parametrize(("steps", "seconds"), [(0, 1), (1001, 1), (-1, 1), (5, 0), (5, 60.1), (5, float("nan"))])
def test_bounds_are_refused(bench: Bench, steps: int, seconds: float) -> None:
    with pytest.raises(ProfileRefusedError, match="a profile"):
        bench.profiler.open(steps, seconds)
    bench.profiler.open(5, 1)


@pytest.mark.parametrize("where", ["make", "start", "stop", "mark", "unmark", "write"])
def test_a_profiler_that_fails_affects_no_step(bench: Bench, where: str) -> None:
    window = bench.profiler.open(2, 60)
    bench.failing = where
    bench.steps(5)
    with pytest.raises(ProfileFailedError, match=f"cannot {where}"):
        window.wait(5)
    bench.failing = ""
    again = bench.profiler.open(2, 60)
    bench.steps(5)
    assert again.wait(5).steps == 2
    bench.failing = where
    bench.profiler.warm_up()  # nor does it prevent a replica from starting


def test_a_step_that_fails_keeps_its_error(bench: Bench) -> None:
    window = bench.profiler.open(2, 60)
    bench.steps(1)
    with (
        pytest.raises(ValueError, match="the model"),
        bench.profiler.step(StepPlan(9, [], [], [], [Work(0, 1, 1, True)])),
    ):
        raise ValueError("the model")
    bench.steps(1)
    assert window.wait(5).steps == 2


def test_operators_are_ranked_by_their_own_time() -> None:
    def event(name: str, ts: float, dur: float, tid: int = 1, cat: str = "cpu_op") -> dict[str, Any]:
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "pid": 1}

    trace = {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 1, "tid": 0, "args": {"name": "python"}},
            event("step 1", 0, 100, cat="user_annotation"),
            event("linear", 0, 100),
            event("mm", 10, 60),
            event("empty", 20, 10),
            event("mm", 70, 30),
            event("mm", 5, 50, tid=2),  # at the same time in another thread
            event("gemm", 40, 500, tid=7, cat="kernel"),
            {"ph": "i", "s": "g", "name": "Record Window End", "ts": 5.5, "pid": "", "tid": ""},
        ]
    }
    found = top_operators(json.dumps(trace).encode())
    assert [(entry.name, entry.calls, entry.milliseconds, entry.on_device) for entry in found] == [
        ("gemm", 1, 0.5, True),
        ("mm", 3, 0.13, False),
        ("linear", 1, 0.01, False),
        ("empty", 1, 0.01, False),
    ]
    assert sum(entry.share for entry in found) == pytest.approx(2)


@pytest.mark.parametrize("threaded", [False, True], ids=["step by step", "planned ahead"])
def test_torch_records_the_thread_that_runs_the_steps(tmp_path: Path, threaded: bool) -> None:
    import torch

    from headrace_worker.assembly.step_thread import ThreadRunner
    from headrace_worker.core.engine import Engine

    config = ReplicaConfig(replica_id="m-0", model="m", source="", profile_dir=str(tmp_path))
    profiler = make_profiler(config, 0)
    assert profiler is not None
    base = make_bench()
    plain = base.runner.on_launch
    base.runner.on_launch = lambda plan: (plain(plan), torch.ones(3, 3) @ torch.ones(3, 3))[0]
    profiled: Any = ProfiledRunner(base.runner, profiler)
    runner = ThreadRunner(profiled, ThreadPoolExecutor(1)) if threaded else profiled
    base.engine = Engine(base.scheduler, runner, base.clock, 1 if threaded else 0)
    profiler.warm_up()
    window = profiler.open(4, 60)
    base.run([base.request([1, 2, 3], 12)])
    report = window.wait(20)
    assert report.steps == 4
    trace = json.loads(gzip.decompress(Path(report.path).read_bytes()))
    spans = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    assert sum(event["name"] == "aten::mm" for event in spans) == 4
    assert sum(event["name"].startswith("step ") for event in spans) == 4
    assert {"aten::mm", "aten::fill_"} <= {entry.name for entry in report.operators}
    assert [path.suffix for path in tmp_path.iterdir()] == [".gz"], "nothing else is left"
    unended = profiler.open(4, 60)
    base.engine.run_empty_step()
    with pytest.raises(ProfileFailedError, match="no step ran"):
        unended.wait(5)

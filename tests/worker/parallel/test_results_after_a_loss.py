"""What a step computes while a rank is lost is not used: on a GPU its wait ends as if nothing had happened.

When NCCL is aborted, a kernel that waits for the lost rank exits, and the rest of the step computes with what it has.
"""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_worker.assembly.command_queue import CommandQueue
from headrace_worker.assembly.loop import EngineLoop, StepReport
from headrace_worker.comm.failure_detection import FailureDetector
from headrace_worker.core.plan import StepResult
from headrace_worker.core.request import Finish, Output
from headrace_worker.core.step_runner import RunnerBrokenError
from headrace_worker.ranks.messages import Answer
from headrace_worker.ranks.multi_rank_runner import MultiRankRunner, StepTicket
from headrace_worker.ranks.stage import StageResult

TOKEN = 123


class AbortedSamples:
    """Of a step whose wait ends with the abort."""

    def __init__(self, aborted: threading.Event) -> None:
        self._aborted = aborted

    def to_result(self, step: int) -> StepResult:
        assert self._aborted.wait(30)
        return StepResult(step, [TOKEN], {}, {})


class AbortedChannel:
    """The last stage's answer comes although its group was aborted."""

    def __init__(self, aborted: threading.Event) -> None:
        self._aborted = aborted

    def receive_answer(self, rank: int) -> Answer:
        assert self._aborted.wait(30)
        return Answer(StepResult(1, [TOKEN], {}, {}))


def runner_of(detector: FailureDetector, stages: int, aborted: threading.Event) -> tuple[MultiRankRunner, StepTicket]:
    topology = SimpleNamespace(pp=stages, samples=stages == 1, sampler=stages - 1)
    team: Any = SimpleNamespace(topology=topology, detector=detector, host=None)
    runner: Any = SimpleNamespace(layout=None, num_blocks=1, max_rows=1, max_len=1, device=None)
    made = MultiRankRunner(runner, None, team)  # type: ignore[arg-type]
    made._channel = AbortedChannel(aborted)  # type: ignore[assignment]
    samples: Any = AbortedSamples(aborted)
    return made, StepTicket(1, StageResult(samples=samples), True, True)


class OneStepEngine:
    """Its requests get what `step` returns."""

    has_work = True

    def __init__(self, step: Callable[[], list[Output]]) -> None:
        self.step = step
        self.exchange = SimpleNamespace(busy=False, take_outbound=lambda: None)

    def load(self) -> Any:
        return SimpleNamespace(running=1)

    def take_cache_changes(self) -> list[object]:
        return []


def outputs_of(step: Callable[[], list[Output]], begin: Callable[[EngineLoop], None]) -> list[Output]:
    """Of a loop with one request, which runs steps until it ends."""
    reports: list[StepReport] = []
    engine: Any = OneStepEngine(step)
    loop = EngineLoop(engine, reports.append, CommandQueue())
    loop._held.add(b"a")
    begin(loop)
    thread = threading.Thread(target=loop.run, daemon=True)
    thread.start()
    assert loop.ended.wait(30)
    thread.join(30)
    assert reports[-1].last
    return [output for report in reports for output in report.outputs]


@pytest.mark.parametrize("stages", [1, 2])
def test_tokens_are_dropped(stages: int) -> None:
    detector, aborted = FailureDetector(0), threading.Event()
    detector.on_loss(lambda failure: aborted.set())
    runner, ticket = runner_of(detector, stages, aborted)

    def begin(loop: EngineLoop) -> None:
        detector.on_loss(loop.abandon)
        threading.Timer(0.1, lambda: detector.fail("a step hangs")).start()

    def step() -> list[Output]:
        return [Output(b"a", 0, list(runner.collect(ticket).tokens))]

    found = outputs_of(step, begin)
    assert [(output.token_ids, output.finish) for output in found] == [([], Finish.CANCELLED)]


def test_tokens_of_a_defective_device_are_dropped() -> None:
    """Of a single rank, whose step ends although the driver has reported the device meanwhile."""
    loops: list[EngineLoop] = []

    def step() -> list[Output]:
        loops[0].abandon(RunnerBrokenError("cuda:0 is defective"))
        return [Output(b"a", 0, [TOKEN])]

    found = outputs_of(step, loops.append)
    assert [(output.token_ids, output.finish) for output in found] == [([], Finish.CANCELLED)]

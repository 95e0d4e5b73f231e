"""Steps with a profiler around them. Without a profiler nothing of this is in their way."""

from collections.abc import Mapping
from typing import Any

from headrace_worker.engine import StepRunner
from headrace_worker.guide import Mask
from headrace_worker.parallel.messages import Step
from headrace_worker.parallel.stage import StageResult, StageRunner
from headrace_worker.plan import StepPlan, StepResult
from headrace_worker.profiling.profiler import StepProfiler


class ProfiledRunner:
    """A `StepRunner` on rank 0. Goes inside whatever moves steps to another thread."""

    def __init__(self, runner: StepRunner, profiler: StepProfiler) -> None:
        self._runner = runner
        self._profiler = profiler

    def launch(self, plan: StepPlan) -> Any:
        with self._profiler.step(plan):
            return self._runner.launch(plan)

    def draw(self, handle: Any, masks: Mapping[int, Mask]) -> None:
        self._runner.draw(handle, masks)

    def collect(self, handle: Any) -> StepResult:
        return self._runner.collect(handle)


class ProfiledStage(StageRunner):
    """A rank's part of every step, on the ranks that follow rank 0."""

    profiler: StepProfiler

    def run(self, step: Step) -> StageResult:
        with self.profiler.step(step.plan):
            return super().run(step)

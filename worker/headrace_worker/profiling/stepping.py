"""Runners whose steps are profiled. Not used without a profiler."""

from collections.abc import Mapping
from typing import Any

from headrace_worker.core.guide import Mask
from headrace_worker.core.plan import StepPlan, StepResult
from headrace_worker.core.step_runner import StepRunner
from headrace_worker.model.load import LoadedModel
from headrace_worker.profiling.profiler import StepProfiler
from headrace_worker.ranks.messages import Step
from headrace_worker.ranks.stage import StageResult, StageRunner
from headrace_worker.ranks.team import Team
from headrace_worker.runner.rank_runner import Runner


class ProfiledRunner:
    """A profiled `StepRunner` on rank 0. Wrap it in a `ThreadRunner`, not the other way round."""

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
    """A profiled rank's part of every step, on ranks other than 0."""

    def __init__(self, model: LoadedModel, runner: Runner, team: Team, profiler: StepProfiler) -> None:
        super().__init__(model, runner, team)
        self._profiler = profiler

    def run(self, step: Step) -> StageResult:
        with self._profiler.step(step.plan):
            return super().run(step)

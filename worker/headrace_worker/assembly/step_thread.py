"""A thread that loads and runs steps beside the engine's: on a CPU this makes `launch` return before the step is done.

A GPU does not need it: the device runs asynchronously. Kernels and large tensor operations release the GIL, so that the
next step can be planned meanwhile.
"""

from collections.abc import Mapping
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

from headrace_worker.core.guide import Mask
from headrace_worker.core.plan import StepPlan, StepResult
from headrace_worker.core.step_runner import StepRunner


@dataclass(slots=True)
class ThreadStep:
    """A step that is queued for the thread, or running there."""

    latest: "Future[Any]"  # its result; the inner runner's handle until `draw` is called


class ThreadRunner:
    """A `StepRunner` that runs all calls of another one on a single thread, in order."""

    def __init__(self, runner: StepRunner, thread: Executor) -> None:
        """`thread`: of one thread; the one that loaded the model."""
        self._runner = runner
        self._thread = thread

    def launch(self, plan: StepPlan) -> ThreadStep:
        return ThreadStep(self._thread.submit(self._runner.launch if plan.guided else self._run, plan))

    def draw(self, handle: ThreadStep, masks: Mapping[int, Mask]) -> None:
        handle.latest = self._thread.submit(self._draw, handle.latest, masks)

    def collect(self, handle: ThreadStep) -> StepResult:
        """Raises whatever the step raised."""
        result: StepResult = handle.latest.result()
        return result

    def _run(self, plan: StepPlan) -> StepResult:
        return self._runner.collect(self._runner.launch(plan))

    def _draw(self, launched: "Future[Any]", masks: Mapping[int, Mask]) -> StepResult:
        handle = launched.result()  # done already: the thread runs calls in order
        self._runner.draw(handle, masks)
        return self._runner.collect(handle)

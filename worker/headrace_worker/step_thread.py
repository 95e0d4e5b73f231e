"""Runs steps on a thread of its own: on a CPU this is what makes `launch` return before the step is done.

A GPU needs none of this: there the device itself runs behind the host. Kernels and large tensor operations let go of
the interpreter, so that the next step is planned meanwhile.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from headrace_worker.engine import StepRunner
from headrace_worker.guide import Mask
from headrace_worker.plan import StepPlan, StepResult


@dataclass(slots=True)
class ThreadStep:
    """A step on its way to the thread, or there."""

    latest: "Future[Any]"  # its result; the inner runner's handle while nothing is drawn


class StepThread:
    """A `StepRunner` over another one, all of whose calls happen on one thread, in their order."""

    def __init__(self, runner: StepRunner, prepare: Callable[[], None] = lambda: None) -> None:
        """`prepare` runs on the thread before anything else."""
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headrace-device", initializer=prepare)

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
        handle = launched.result()  # there already, as the thread comes here after it
        self._runner.draw(handle, masks)
        return self._runner.collect(handle)

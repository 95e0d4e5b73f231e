"""Runs steps on a thread of its own: on a CPU this is what makes `launch` return before the step is done.

A GPU needs none of this: there the device itself runs behind the host. Kernels and large tensor operations let go of
the interpreter, so that the next step is planned meanwhile.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from headrace_worker.engine import StepRunner
from headrace_worker.plan import StepPlan, StepResult


class StepThread:
    """A `StepRunner` over another one, whose launches and collects all happen on one thread, in their order."""

    def __init__(self, runner: StepRunner, prepare: Callable[[], None] = lambda: None) -> None:
        """`prepare` runs on the thread before anything else."""
        self._runner = runner
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="headrace-device", initializer=prepare)

    def launch(self, plan: StepPlan) -> "Future[StepResult]":
        return self._thread.submit(self._run, plan)

    def collect(self, handle: "Future[StepResult]") -> StepResult:
        """Raises whatever the step raised."""
        return handle.result()

    def _run(self, plan: StepPlan) -> StepResult:
        return self._runner.collect(self._runner.launch(plan))

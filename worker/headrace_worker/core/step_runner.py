"""The interface of everything that executes plans: one device, several ranks, a thread, a simulation."""

from collections.abc import Mapping
from typing import Any, Protocol

from headrace_base.errors import HeadraceError
from headrace_worker.core.guide import Mask
from headrace_worker.core.plan import StepPlan, StepResult


class StepRunner(Protocol):
    """Executes plans, without waiting for the device. Handles are collected in the order of launches.

    For a guided plan `launch` only begins the forward pass. `draw` is called once the masks are ready, before the next
    launch.
    """

    def launch(self, plan: StepPlan) -> Any: ...

    def draw(self, handle: Any, masks: Mapping[int, Mask]) -> None:
        """`masks` by index into the tokens that the plan samples; rows without one are unconstrained."""
        ...

    def collect(self, handle: Any) -> StepResult: ...


class RunnerBrokenError(HeadraceError):
    """Raised by a runner that cannot continue: another rank is lost, or the device is in error."""

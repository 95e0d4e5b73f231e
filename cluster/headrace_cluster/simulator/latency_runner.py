"""Executes plans by taking their time."""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from random import Random

from headrace_cluster.simulator.latency_model import LatencyModel
from headrace_cluster.simulator.replica_shape import OUTPUT_TOKEN
from headrace_worker.core.guide import Mask
from headrace_worker.core.plan import StepPlan, StepResult
from headrace_worker.core.transfer.orders import Order


class LatencyRunner:
    """Implements StepRunner: a step's samples are known when its time has been spent."""

    def __init__(
        self,
        latency: LatencyModel,
        random: Random,
        noise: float,
        slowdown: float,
        spend: Callable[[float], None],
        execute: Callable[[Order], None],
    ) -> None:
        """noise: standard deviation of a step's time, as a share of it. slowdown: factor of every step's time.

        execute: an order of KV transfer.
        """
        self.slowdown = slowdown
        self._factors: deque[float] = deque()  # that were drawn and not used
        self._latency = latency
        self._random = random
        self._noise = noise
        self._spend = spend
        self._execute = execute

    def launch(self, plan: StepPlan) -> StepPlan:
        return plan

    def draw(self, handle: StepPlan, masks: Mapping[int, Mask]) -> None:
        """No request of a simulation is constrained."""

    def collect(self, handle: StepPlan) -> StepResult:
        plan = handle
        if plan.work:
            self._spend(self.step_seconds([(work.start, work.count) for work in plan.work]))
        for order in plan.orders:
            self._execute(order)
        tokens = [OUTPUT_TOKEN + work.start + work.count for work in plan.work if work.sample]
        return StepResult(plan.step, tokens, {}, {})

    def step_seconds(self, work: list[tuple[int, int]]) -> float:
        """With its noise, drawn anew at each call."""
        return self._latency.seconds(work) * self.draw_factor() * self.slowdown

    def decode_seconds(self, sequences: int, kv_tokens: int, factor: float) -> float:
        """The same of a step that only decodes, with a factor that was drawn."""
        return self._latency.of(0, sequences, kv_tokens, 0) * factor * self.slowdown

    def draw_factor(self) -> float:
        """The noise of the next step."""
        if self._factors:
            return self._factors.popleft()
        return max(0.5, self._random.gauss(1.0, self._noise)) if self._noise else 1.0

    def put_back(self, factors: Sequence[float]) -> None:
        """The next steps get these."""
        self._factors.extendleft(reversed(factors))

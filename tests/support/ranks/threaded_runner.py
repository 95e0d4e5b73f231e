"""Runs a step on the runners of all ranks in one process."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headrace_worker.core.guide import Mask
from headrace_worker.core.plan import StepPlan, StepResult
from headrace_worker.runner import Runner, StepHandle


@dataclass
class ThreadedRunner:
    """A `StepRunner` over the runners of all ranks: stages run sequentially, the ranks of a stage as threads."""

    stages: list[list[Runner]]
    batches: list[list[Any]] = field(default_factory=list)  # of the last launched step

    def __post_init__(self) -> None:
        self._threads = ThreadPoolExecutor(len(self.stages[0]))

    def launch(self, plan: StepPlan) -> StepHandle:
        batches = self.batches = [[runner.prepare(plan) for runner in stage] for stage in self.stages]
        handle = StepHandle(plan.step)
        if batches[0][0] is None:
            return handle
        received: list[Tensor | None] = [None] * len(self.stages[0])
        for stage, stage_batches in zip(self.stages, batches, strict=True):
            received = list(self._threads.map(Runner.forward, stage, stage_batches, received))
        logits = received[0]
        if logits is None:
            return handle
        for other in received[1:]:
            assert other is not None and torch.equal(logits, other), "the ranks of a stage computed different logits"
        handle.undrawn = batches[-1][0], logits
        if not plan.guided:
            self.draw(handle, {})
        return handle

    def draw(self, handle: StepHandle, masks: Mapping[int, Mask]) -> None:
        assert handle.undrawn is not None
        handle.samples = samples = self.stages[-1][0].sample(*handle.undrawn, masks)
        for stage, stage_batches in zip(self.stages, self.batches, strict=True):
            for runner, batch in zip(stage, stage_batches, strict=True):
                runner.apply_tokens(batch, samples.tokens)

    def collect(self, handle: StepHandle) -> StepResult:
        return self.stages[0][0].collect(handle)

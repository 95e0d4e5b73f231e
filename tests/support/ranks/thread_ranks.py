"""Ranks that are threads of one process and exchange tensors at a barrier: no sockets, no processes."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from headrace_worker.core.guide import Mask
from headrace_worker.core.plan import StepPlan, StepResult
from headrace_worker.model.load import LoadedModel
from headrace_worker.offline import Completion, OfflineEngine
from headrace_worker.runner import Runner, StepHandle
from support.ranks.workloads import checked_run


class ThreadGroup:
    """State shared by the ranks of one group."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=30)
        self.slots: list[Tensor] = [torch.empty(0)] * size


class ThreadCommunicator:
    """A communicator between threads of one process."""

    def __init__(self, rank: int, group: ThreadGroup) -> None:
        self.rank, self.size = rank, len(group.slots)
        self._group = group
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._group.slots[self.rank] = tensor.clone()
        self._group.barrier.wait()
        parts = list(self._group.slots)
        self._group.barrier.wait()
        assert len({part.shape for part in parts}) == 1
        return parts

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.calls.append(("reduce", tuple(tensor.shape)))
        first, *rest = self._exchange(tensor)
        tensor.copy_(first)
        for part in rest:
            tensor.add_(part)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        self.calls.append(("gather", tuple(tensor.shape)))
        return torch.cat(self._exchange(tensor), dim)


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


@dataclass
class ShardedReplica:
    """All ranks of a replica, and an engine over them."""

    models: list[list[LoadedModel]]  # by stage, then tp rank
    runners: list[list[Runner]]
    offline: OfflineEngine

    @property
    def ranks(self) -> list[LoadedModel]:
        return [model for stage in self.models for model in stage]

    def run(
        self, prompts: Sequence[Sequence[int]], count: int, after_step: Callable[[], None] = lambda: None
    ) -> list[Completion]:
        return checked_run(self.offline, prompts, count, after_step)

"""A replica whose ranks are threads of one process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace_worker.model.load import LoadedModel
from headrace_worker.offline import Completion, OfflineEngine
from headrace_worker.runner import Runner
from support.ranks.checked_run import checked_run


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

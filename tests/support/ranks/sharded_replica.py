"""A replica whose ranks are threads of one process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace_worker.core.plan import RowSampling
from headrace_worker.model.load import LoadedModel
from headrace_worker.offline import Completion, OfflineEngine, Prompt
from headrace_worker.runner import Runner


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
        """Greedy tokens; the bookkeeping is checked at every step, and all blocks are released in the end."""
        greedy = RowSampling(temperature=0.0, logprobs=2)
        work = [Prompt(prompt, count, greedy, ignore_eos=True) for prompt in prompts]

        def check() -> None:
            self.offline.assembly.engine.scheduler.check()
            after_step()

        completions = self.offline.generate(work, after_step=check)
        assert [len(completion.token_ids) for completion in completions] == [count] * len(prompts)
        assert self.offline.assembly.kv.pool.used == 0
        return completions

"""Requests to a replica, with its bookkeeping checked at every step."""

from collections.abc import Callable, Sequence

from headrace_worker.core.plan import RowSampling
from headrace_worker.offline import Completion, OfflineEngine, Prompt


def checked_run(
    offline: OfflineEngine, prompts: Sequence[Sequence[int]], count: int, after_step: Callable[[], None]
) -> list[Completion]:
    """`count` greedy tokens after each prompt; all blocks are released in the end."""
    greedy = RowSampling(temperature=0.0, logprobs=2)
    work = [Prompt(prompt, count, greedy, ignore_eos=True) for prompt in prompts]

    def check() -> None:
        offline.assembly.engine.scheduler.check()
        after_step()

    completions = offline.generate(work, after_step=check)
    assert [len(completion.token_ids) for completion in completions] == [count] * len(prompts)
    assert offline.assembly.kv.pool.used == 0
    return completions

"""Constrained outputs over several ranks: the masks are sent to the rank that samples."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from guides import Rule, RuleGuide, exactly, number, one_in
from test_shard_oracle import prompts

from headrace_worker.core.config import ReplicaConfig
from headrace_worker.core.plan import RowSampling
from headrace_worker.core.request import Finish
from headrace_worker.offline import Completion, OfflineEngine, Prompt

VOCABULARY, END = 317, 2
RULES: list[Rule | None] = [
    one_in(7, VOCABULARY),
    None,
    number(range(48, 120, 3), END, 8),
    exactly([300, 5, 5, 316, 40, 7]),
    one_in(50, VOCABULARY),
    None,
]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 1.0, "seed": 1},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 2},
    {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "seed": 3},
    {"temperature": 1.0, "seed": 4, "min_tokens": 3, "stop_token_ids": (END,)},
]
SIZES: dict[str, Any] = {"kv_cache_memory": 8 << 20, "max_num_seqs": 16, "max_num_batched_tokens": 48}


def workload(count: int) -> list[Prompt]:
    work = []
    for index, ids in enumerate(prompts(count, seed=3)):
        rule, sampling = RULES[index % len(RULES)], RowSampling(**OPTIONS[index % len(OPTIONS)])
        longest = 6 if rule is RULES[3] else 1 << 30
        guide = None if rule is None else lambda rule=rule, longest=longest: RuleGuide(VOCABULARY, rule, longest)
        work.append(Prompt(ids, 10, sampling, guide=guide))
    # One whose third mask allows no token of the model.
    dead_end = RuleGuide(VOCABULARY + 32, lambda taken: (VOCABULARY + 1,) if len(taken) == 2 else range(30, 60))
    work.insert(2, Prompt([5, 6], 8, RowSampling(temperature=0.0), guide=lambda: RuleGuide(349, dead_end.rule)))
    return work


def outcome(completions: Sequence[Completion]) -> list[Any]:
    return [(completion.token_ids, completion.finish, completion.error) for completion in completions]


@pytest.fixture(scope="session")
def expected(save_tiny: Callable[..., Path], replica_config: Callable[..., ReplicaConfig]) -> list[Any]:
    """The outcome on one rank."""
    config = replica_config(save_tiny("llama"), max_model_len=128, **SIZES)
    found = outcome(OfflineEngine(config).generate(workload(16)))
    assert [index for index, (_, finish, _) in enumerate(found) if finish is Finish.ERROR] == [2]
    assert {finish for _, finish, _ in found} == {Finish.ERROR, Finish.STOP, Finish.LENGTH}
    return found


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
def test_between_threads(
    tp: int, pp: int, save_tiny: Callable[..., Path], sharded: Callable[..., Any], expected: list[Any]
) -> None:
    replica = sharded(save_tiny("llama"), tp, pp)
    assert outcome(replica.offline.generate(workload(16))) == expected


@pytest.mark.parametrize(
    ("tp", "pp", "ahead"), [(2, 1, "off"), (2, 1, "on"), (1, 2, "off"), (1, 3, "off"), (2, 2, "off")]
)
def test_between_processes(
    tp: int,
    pp: int,
    ahead: str,
    save_tiny: Callable[..., Path],
    process_replica: Callable[..., Any],
    expected: list[Any],
) -> None:
    """Twice, the second time with prefixes from the cache; and with a pool so small that some are preempted."""
    folder = save_tiny("llama")
    share = 30_000 * {1: 3, 2: 2, 3: 1}[pp] // tp  # layers of the first stage
    with process_replica(folder, tp, pp, async_scheduling=ahead) as replica:
        assert outcome(replica.offline.generate(workload(16))) == expected
        assert outcome(replica.offline.generate(workload(16))) == expected
        assert replica.offline.assembly.kv.pool.used == 0
    with process_replica(folder, tp, pp, async_scheduling=ahead, kv_cache_memory=share) as replica:
        engine = replica.offline.assembly.engine
        assert outcome(replica.offline.generate(workload(16), after_step=engine.scheduler.check)) == expected
        assert engine.scheduler.counters.preemptions > 0


def test_failed_sampling_leaves_the_ranks_synchronized(
    save_tiny: Callable[..., Path], process_replica: Callable[..., Any], expected: list[Any]
) -> None:
    with process_replica(save_tiny("llama"), 2, 1) as replica:
        sampler = replica.offline.assembly.runner.sampler
        sample, calls = sampler.sample, 0

        def faulty(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls in (4, 20):
                raise ArithmeticError
            return sample(*arguments)

        sampler.sample = faulty
        assert outcome(replica.offline.generate(workload(16))) == expected
        assert calls > 20

"""All options of a request have the same result over several ranks as on one; and the sizes that ranks report."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_worker.core.engine import Engine
from headrace_worker.core.plan import StepPlan
from headrace_worker.core.request import Finish
from headrace_worker.offline import Completion, OfflineEngine
from support.ranks.small_replica import SMALL_POOL_BLOCKS
from support.ranks.varied_prompts import same, varied_prompts
from support.worker.tiny_models import replica_config

SPLITS = [(2, 1), (1, 2), (2, 2)]
WIDE = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "tie_word_embeddings": False}


class InFlight:
    """Counts launched steps that are not collected, and checks that no row is planned before its token is known."""

    def __init__(self, engine: Engine) -> None:
        self.highest = 0
        self._waiting: dict[
            int, set[tuple[int, int]]
        ] = {}  # by step: rows whose token is in flight, and the number of its use
        self._owners: dict[int, int] = {}
        runner: Any = engine._runner
        self._launch, self._collect = runner.launch, runner.collect
        runner.launch, runner.collect = self.launch, self.collect

    def launch(self, plan: StepPlan) -> Any:
        self._owners |= {init.row: init.row_use for init in plan.inits}
        rows = {(work.row, self._owners[work.row]) for work in plan.work}
        assert not any(rows & waiting for waiting in self._waiting.values())
        self._waiting[plan.step] = {(work.row, self._owners[work.row]) for work in plan.work if work.sample}
        self.highest = max(self.highest, len(self._waiting))
        return self._launch(plan)

    def collect(self, handle: Any) -> Any:
        del self._waiting[handle.step]
        return self._collect(handle)


@pytest.mark.parametrize(("tp", "pp"), SPLITS)
def test_requests_of_all_kinds(
    tp: int, pp: int, split_replica: Callable[..., Any], on_one_rank: Callable[..., list[Completion]]
) -> None:
    """Seeds, penalties, bias, minimum, stop, logprobs; preempted, then again from the cache."""
    work = varied_prompts()
    expected = on_one_rank(work)
    assert {completion.finish for completion in expected} <= {Finish.STOP, Finish.COMPLETE, Finish.LENGTH}
    with split_replica(tp, pp) as replica:
        engine = replica.offline.assembly.engine
        assert replica.offline.assembly.size.num_blocks == SMALL_POOL_BLOCKS
        in_flight = InFlight(engine)
        completions = replica.offline.generate(work, after_step=engine.scheduler.check)
        same(completions, expected)
        assert sum(completion.preemptions for completion in completions) > 0
        assert in_flight.highest == pp
        again = replica.offline.generate(work[-2:])
        same(again, expected[-2:])
        assert all(completion.cached_tokens > 0 for completion in again)
        assert replica.offline.assembly.kv.pool.used == 0


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_cancels_in_the_middle_do_not_affect_the_others(
    tp: int, pp: int, split_replica: Callable[..., Any], on_one_rank: Callable[..., list[Completion]]
) -> None:
    work = varied_prompts()
    expected = on_one_rank(work)
    with split_replica(tp, pp) as replica:
        engine, steps = replica.offline.assembly.engine, 0
        cancelled: list[Any] = []

        def disturb() -> None:
            nonlocal steps
            steps += 1
            engine.scheduler.check()
            if steps in (3, 4, 9) and len(engine._requests) > 4:
                victim = next(iter(engine._requests))
                assert engine.cancel(victim).finish is Finish.CANCELLED
                cancelled.append(len(cancelled))  # requests are stored in the order of arrival
                engine.scheduler.check()

        completions = replica.offline.generate(work, after_step=disturb)
        assert len(cancelled) == 3
        same(completions[3:], expected[3:])
        for completion, whole in zip(completions[:3], expected[:3], strict=True):
            assert completion.finish is None
            assert completion.token_ids == whole.token_ids[: len(completion.token_ids)]
        assert replica.offline.assembly.kv.pool.used == 0


def test_failed_sampling_ends_no_other_request(
    split_replica: Callable[..., Any], on_one_rank: Callable[..., list[Completion]]
) -> None:
    """On the rank that samples; the ranks stay synchronized, and requests that failed together are retried alone."""
    work = varied_prompts()[:4]
    expected = on_one_rank(work)
    with split_replica(2, 1) as replica:
        sampler = replica.offline.assembly.runner.sampler
        sample, calls = sampler.sample, 0

        def faulty(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls in (4, 9):
                raise ArithmeticError
            return sample(*arguments)

        sampler.sample = faulty
        completions = replica.offline.generate(work, after_step=replica.offline.assembly.engine.scheduler.check)
        same(completions, expected)
        assert calls > 9


@pytest.fixture
def facts(
    save_tiny: Callable[..., Path], process_replica: Callable[..., Any]
) -> Iterator[Callable[..., list[tuple[int, int, int]]]]:
    """Weights, bytes of the cache and blocks of every rank of a replica, as reported by the ranks."""

    def get(tp: int, pp: int, **changes: Any) -> list[tuple[int, int, int]]:
        with process_replica(save_tiny("llama", **changes), tp, pp, kv_cache_memory=1 << 20) as replica:
            assembly = replica.offline.assembly
            first = (assembly.model.weight_bytes, assembly.size.num_bytes, assembly.size.num_blocks - 1)
            reported = [replica.fork_server.facts(pid) for pid in replica.pids]
            return [first, *((each["weight_bytes"], each["kv_bytes"], each["kv_blocks"]) for each in reported)]

    yield get


def test_two_ranks_hold_half_of_the_weights_and_twice_the_tokens(
    facts: Callable[..., list[tuple[int, int, int]]], save_tiny: Callable[..., Path]
) -> None:
    changes = WIDE | {"num_key_value_heads": 4}
    config = replica_config(save_tiny("llama", **changes), kv_cache_memory=1 << 20, max_num_seqs=16, max_model_len=128)
    whole = OfflineEngine(config).assembly
    for weights, cache, blocks in facts(2, 1, **changes):
        assert weights == pytest.approx(whole.model.weight_bytes / 2, rel=0.06)
        assert cache == pytest.approx(1 << 20, rel=0.02)
        assert blocks == pytest.approx(2 * whole.size.num_blocks, rel=0.02)


def test_the_rank_with_the_least_memory_limits_the_number_of_blocks(
    facts: Callable[..., list[tuple[int, int, int]]],
) -> None:
    """Three KV heads over two ranks: one has two of them, and needs twice the bytes for a block."""
    (_, large, blocks), (_, small, others) = facts(2, 1, num_attention_heads=6, num_key_value_heads=3, hidden_size=48)
    assert blocks == others
    assert large == 2 * small and large == pytest.approx(1 << 20, rel=0.02)

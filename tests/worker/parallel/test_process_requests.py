"""All options of a request have the same result over several ranks as on one; and the sizes that ranks report."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace_worker.core.engine import Engine
from headrace_worker.core.plan import StepPlan
from headrace_worker.core.request import Finish
from headrace_worker.offline import Completion
from support.ranks.families import SMALL_POOL_BLOCKS
from support.ranks.workloads import same, varied_prompts

SPLITS = [(2, 1), (1, 2), (2, 2)]


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
    """Seeds, penalties, bias, words, minimum, stop, logprobs; preempted, then again from the cache."""
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


def test_the_rank_with_the_least_memory_limits_the_number_of_blocks(
    save_tiny: Callable[..., Path], process_replica: Callable[..., Any]
) -> None:
    """Three KV heads over two ranks: one has two of them, and needs twice the bytes for a block."""
    folder = save_tiny("llama", num_attention_heads=6, num_key_value_heads=3, hidden_size=48)
    with process_replica(folder, 2, 1, kv_cache_memory=1 << 20) as replica:
        size = replica.offline.assembly.size
        other = replica.fork_server.facts(replica.pids[0])
    assert other["kv_blocks"] == size.num_blocks - 1
    assert size.num_bytes == 2 * other["kv_bytes"] == pytest.approx(1 << 20, rel=0.02)

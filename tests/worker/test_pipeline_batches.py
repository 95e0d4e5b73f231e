"""Several batches in flight: one per pipeline stage. The runner knows a token only when its step is collected."""

from itertools import pairwise
from random import Random
from typing import Any

import pytest

from headrace_worker.core.plan import StepPlan
from support.worker.engine_bench import make_bench
from support.worker.fake_model import undisturbed


def prompts(count: int, longest: int = 20) -> list[list[int]]:
    random = Random(count)
    return [[random.randrange(10, 900) for _ in range(random.randrange(1, longest))] for _ in range(count)]


def check(requests: list[Any], emitted: dict[bytes, list[int]]) -> None:
    for request in requests:
        prompt = request.tokens[: request.prompt_len]
        assert emitted[request.attempt_id] == undisturbed(prompt, request.max_len - request.prompt_len)


@pytest.mark.parametrize("batches", [2, 3, 4])
def test_as_many_batches_are_in_flight_as_there_are_stages(batches: int) -> None:
    bench = make_bench(num_blocks=512, max_num_seqs=16, budget=64, batches=batches)
    requests = [bench.request(prompt, max_tokens=20) for prompt in prompts(16)]
    emitted = bench.run(requests)
    assert bench.runner.most_in_flight == batches
    check(requests, emitted)
    assert bench.kv.pool.used == 0


def test_decoding_requests_split_into_even_batches_that_alternate() -> None:
    bench = make_bench(num_blocks=512, max_num_seqs=8, budget=64, batches=2)
    for prompt in prompts(8):
        bench.engine.submit(bench.request(prompt, max_tokens=60))
    steps: list[set[int]] = []
    bench.runner.on_launch = lambda plan: steps.append({work.row for work in plan.work})
    for _ in range(30):
        bench.engine.step()
    steady = steps[8:]
    assert {len(rows) for rows in steady} == {4}
    for before, after in pairwise(steady):
        assert not before & after and len(before | after) == 8


def test_a_long_prompt_fills_the_pipeline_with_its_chunks() -> None:
    """A chunk follows the previous one through the stages; it does not wait for the last stage."""
    bench = make_bench(num_blocks=128, budget=8, batches=2)
    chunks: list[tuple[int, int, bool]] = []
    bench.runner.on_launch = lambda plan: chunks.extend((w.start, w.count, w.sample) for w in plan.work)
    requests = [bench.request(prompts(1, 200)[0] + list(range(50, 100)), max_tokens=4)]
    emitted = bench.run(requests)
    assert bench.runner.most_in_flight == 2
    ends = [start + count for start, count, _ in chunks]
    assert [start for start, _, _ in chunks] == [0, *ends[:-1]]  # in order, none twice
    check(requests, emitted)


def test_a_prefix_is_cached_only_after_all_stages() -> None:
    bench = make_bench(num_blocks=256, budget=64, batches=2)
    stem = list(range(20, 60))
    first = bench.request([*stem, 1], max_tokens=8)
    bench.engine.submit(first)
    bench.engine.step()  # launched, not collected
    early = bench.request([*stem, 2], max_tokens=8)  # waits for the blocks that are being computed
    emitted = bench.run([early])
    late = bench.request([*stem, 3], max_tokens=8)
    emitted |= bench.run([late])
    assert (early.cached_tokens, late.cached_tokens) == (40, 40)
    check([early, late], emitted)


@pytest.mark.parametrize("seed", range(20))
def test_steps_whose_sampling_fails_are_computed_again(seed: int) -> None:
    """Forward succeeded on all stages, sampling failed: other batches are in flight meanwhile."""
    random = Random(seed)
    bench = make_bench(num_blocks=random.randrange(30, 128), budget=16, batches=2)
    failures = 0

    def fail(plan: StepPlan) -> None:
        nonlocal failures
        if len(plan.work) > 1 and (failures == 0 or random.random() < 0.1):
            failures += 1
            raise ArithmeticError

    bench.runner.on_collect = fail
    requests = [bench.request(prompt, max_tokens=12) for prompt in prompts(10)]
    emitted = bench.run(requests)
    assert failures > 0
    check(requests, emitted)
    assert bench.kv.pool.used == 0

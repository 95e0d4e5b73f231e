"""Several batches in flight: one per pipeline stage. The runner knows a token only when its step is collected."""

from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import Any

import pytest

from headrace_worker.core.plan import StepPlan
from headrace_worker.core.request import Finish

Make = Callable[..., Any]
Undisturbed = Callable[[list[int], int], list[int]]


def prompts(count: int, longest: int = 20) -> list[list[int]]:
    random = Random(count)
    return [[random.randrange(10, 900) for _ in range(random.randrange(1, longest))] for _ in range(count)]


def check(requests: list[Any], emitted: dict[bytes, list[int]], undisturbed: Undisturbed) -> None:
    for request in requests:
        prompt = request.tokens[: request.prompt_len]
        assert emitted[request.attempt_id] == undisturbed(prompt, request.max_len - request.prompt_len)


@pytest.mark.parametrize("batches", [2, 3, 4])
def test_as_many_batches_are_in_flight_as_there_are_stages(
    make_bench: Make, undisturbed: Undisturbed, batches: int
) -> None:
    bench = make_bench(num_blocks=512, max_num_seqs=16, budget=64, batches=batches)
    requests = [bench.request(prompt, max_tokens=20) for prompt in prompts(16)]
    emitted = bench.run(requests)
    assert bench.runner.most_in_flight == batches
    check(requests, emitted, undisturbed)
    assert bench.kv.pool.used == 0


def test_decoding_requests_split_into_even_batches_that_alternate(make_bench: Make) -> None:
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


def test_one_request_alone_is_never_in_two_batches_while_it_decodes(make_bench: Make, undisturbed: Undisturbed) -> None:
    bench = make_bench(batches=2)
    requests = [bench.request([5, 6, 7], max_tokens=20)]
    emitted = bench.run(requests)
    check(requests, emitted, undisturbed)
    assert bench.runner.most_in_flight == 1


def test_a_long_prompt_fills_the_pipeline_with_its_chunks(make_bench: Make, undisturbed: Undisturbed) -> None:
    """A chunk follows the previous one through the stages; it does not wait for the last stage."""
    bench = make_bench(num_blocks=128, budget=8, batches=2)
    chunks: list[tuple[int, int, bool]] = []
    bench.runner.on_launch = lambda plan: chunks.extend((w.start, w.count, w.sample) for w in plan.work)
    requests = [bench.request(prompts(1, 200)[0] + list(range(50, 100)), max_tokens=4)]
    emitted = bench.run(requests)
    assert bench.runner.most_in_flight == 2
    ends = [start + count for start, count, _ in chunks]
    assert [start for start, _, _ in chunks] == [0, *ends[:-1]]  # in order, none twice
    check(requests, emitted, undisturbed)


@pytest.mark.parametrize("batches", [2, 3])
def test_preemption_with_batches_in_flight_changes_no_token(
    make_bench: Make, undisturbed: Undisturbed, batches: int
) -> None:
    bench = make_bench(num_blocks=20, budget=16, batches=batches)
    requests = [bench.request(prompt, max_tokens=24) for prompt in prompts(8, 14)]
    emitted = bench.run(requests)
    assert bench.scheduler.counters.preemptions > 0
    check(requests, emitted, undisturbed)


@pytest.mark.parametrize("steps", range(10))
def test_a_cancel_frees_at_once_and_the_token_in_flight_is_dropped(
    make_bench: Make, undisturbed: Undisturbed, steps: int
) -> None:
    bench = make_bench(num_blocks=64, budget=6, max_num_seqs=3, batches=2)
    doomed = bench.request([5] * 14, max_tokens=30)
    others = [bench.request(prompt, max_tokens=12) for prompt in prompts(5)]
    for request in (doomed, *others):
        bench.engine.submit(request)
    emitted: dict[bytes, list[int]] = {}
    for _ in range(steps):
        for output in bench.engine.step():
            emitted.setdefault(output.attempt_id, []).extend(output.token_ids)
    before = len(emitted.get(doomed.attempt_id, []))
    assert bench.engine.cancel(doomed.attempt_id).finish is Finish.CANCELLED
    bench.scheduler.check()
    bench.step_until_idle(emitted)
    assert len(emitted.get(doomed.attempt_id, [])) == before
    check(others, emitted, undisturbed)
    assert bench.kv.pool.used == 0


def test_a_stop_token_ends_one_request_and_not_its_batch(make_bench: Make, undisturbed: Undisturbed) -> None:
    bench = make_bench(num_blocks=256, batches=2)
    requests = [bench.request(prompt, max_tokens=20) for prompt in prompts(6)]
    tokens = undisturbed(requests[2].tokens, 20)
    requests[2].stop_ids = frozenset({tokens[6]})
    emitted = bench.run(requests)
    first = tokens.index(tokens[6])
    assert emitted[requests[2].attempt_id] == tokens[: first + 1]
    assert requests[2].finish is Finish.STOP
    check(requests[:2] + requests[3:], emitted, undisturbed)


def test_a_prefix_is_cached_only_after_all_stages(make_bench: Make, undisturbed: Undisturbed) -> None:
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
    check([early, late], emitted, undisturbed)


@pytest.mark.parametrize("seed", range(20))
def test_steps_whose_sampling_fails_are_computed_again(make_bench: Make, undisturbed: Undisturbed, seed: int) -> None:
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
    check(requests, emitted, undisturbed)
    assert bench.kv.pool.used == 0

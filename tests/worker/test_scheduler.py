"""The scheduler, KV manager and engine with a fake runner that checks every plan."""

from random import Random
from typing import Any

import pytest

from headrace_worker.core.plan import StepPlan, StepResult
from headrace_worker.core.request import Finish
from headrace_worker.core.step_runner import RunnerBrokenError
from support.worker.engine_bench import make_bench
from support.worker.fake_model import undisturbed


def prompt_of(seed: int, length: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(10, 900) for _ in range(length)]


@pytest.mark.parametrize("depth", [0, 1, 2])
@pytest.mark.parametrize("windows", [(0,), (0, 6), (5,), (8, 0, 3)])
@pytest.mark.parametrize("budget", [8, 16, 64])
def test_tokens_are_those_of_the_undisturbed_run(depth: int, windows: tuple[int, ...], budget: int) -> None:
    bench = make_bench(windows=windows, num_blocks=256, budget=budget, depth=depth)
    requests = [bench.request(prompt_of(i, 1 + i * 5 % 23), max_tokens=1 + i % 9) for i in range(20)]
    emitted = bench.run(requests)
    for request in requests:
        prompt = request.tokens[: request.prompt_len]
        assert emitted[request.attempt_id] == undisturbed(prompt, request.max_len - request.prompt_len)
        assert request.finish is Finish.LENGTH
    assert bench.kv.pool.used == 0


@pytest.mark.parametrize("depth", [0, 1])
def test_preemption_changes_no_token(depth: int) -> None:
    bench = make_bench(num_blocks=20, budget=16, depth=depth)
    requests = [bench.request(prompt_of(i, 12), max_tokens=24) for i in range(8)]
    emitted = bench.run(requests)
    assert bench.scheduler.counters.preemptions > 0
    assert bench.scheduler.counters.prefix_queries == 8 * 12, "blocks that it computed itself are no hits"
    assert bench.scheduler.counters.prefix_hits == 0
    for request in requests:
        assert emitted[request.attempt_id] == undisturbed(request.tokens[:12], 24)


def test_a_prefix_hit_skips_computation_and_leaves_the_last_token() -> None:
    bench = make_bench()
    prompt = prompt_of(1, 16)
    bench.run([bench.request(prompt)])
    again = bench.request(prompt)
    outputs = bench.run([again])
    assert outputs[again.attempt_id] == undisturbed(prompt, 8)
    assert again.cached_tokens == 12  # three of four full blocks: the last prompt token is always computed


def test_tenants_do_not_share_blocks() -> None:
    bench = make_bench()
    prompt = prompt_of(1, 16)
    bench.run([bench.request(prompt, salt=b"a")])
    other, same = bench.request(prompt, salt=b"b"), bench.request(prompt, salt=b"a")
    bench.run([other])
    bench.run([same])
    assert (other.cached_tokens, same.cached_tokens) == (0, 12)


def test_a_window_bounds_the_blocks_of_a_request() -> None:
    bench = make_bench(windows=(8,), num_blocks=64)
    bench.run([bench.request(prompt_of(1, 4), max_tokens=120)])
    assert bench.kv.pool.peak_used <= 8 // 4 + 2


def test_decoding_continues_while_a_long_prompt_is_computed() -> None:
    bench = make_bench(num_blocks=512, budget=16)
    short = bench.request(prompt_of(1, 4), max_tokens=50)
    bench.engine.submit(short)
    bench.engine.step()
    bench.engine.submit(bench.request(prompt_of(2, 200), max_tokens=2))
    for _ in range(10):
        before = len(short.tokens)
        bench.engine.step()
        assert len(short.tokens) == before + 1


def test_no_request_starves_with_more_requests_than_budget() -> None:
    bench = make_bench(num_blocks=512, max_num_seqs=16, budget=8)
    requests = [bench.request(prompt_of(i, 3), max_tokens=90) for i in range(16)]
    for request in requests:
        bench.engine.submit(request)
    while len(bench.scheduler.waiting) > 0 or any(request.missing > 1 for request in requests):
        bench.engine.step()
    before = [len(request.tokens) for request in requests]
    for _ in range(40):
        bench.engine.step()
    gained = [len(request.tokens) - start for request, start in zip(requests, before, strict=True)]
    assert max(gained) - min(gained) <= 2
    assert sum(gained) == 40 * 8


def test_priority_goes_first() -> None:
    bench = make_bench(max_num_seqs=1)
    late = bench.request(prompt_of(1, 4), priority=5)
    early = bench.request(prompt_of(2, 4), priority=-1)
    ends: list[bytes] = []
    for request in (late, early):
        bench.engine.submit(request)
    while bench.engine.has_work:
        ends += [output.attempt_id for output in bench.engine.step() if output.finish]
    assert ends == [early.attempt_id, late.attempt_id]


@pytest.mark.parametrize("depth", [0, 1])
def test_stop_tokens_end_a_request_and_later_tokens_are_dropped(depth: int) -> None:
    bench = make_bench(depth=depth)
    prompt = prompt_of(3, 9)
    tokens = undisturbed(prompt, 20)
    request = bench.request(prompt, max_tokens=20)
    request.stop_ids = frozenset({tokens[6]})
    emitted = bench.run([request])
    assert emitted[request.attempt_id] == tokens[:7]
    assert request.finish is Finish.STOP
    assert bench.scheduler.counters.generation_tokens == 7
    assert bench.kv.pool.used == 0


def test_cancel_frees_at_once_in_every_phase() -> None:
    for steps in range(8):
        bench = make_bench(budget=4, depth=steps % 2)
        request = bench.request(prompt_of(1, 14), max_tokens=30)
        bench.engine.submit(request)
        for _ in range(steps):
            bench.engine.step()
        output = bench.engine.cancel(request.attempt_id)
        assert output.finish is Finish.CANCELLED
        assert bench.kv.pool.used == 0
        bench.step_until_idle({})
        assert bench.engine.cancel(request.attempt_id) is None


def test_a_deadline_ends_waiting_and_running_requests() -> None:
    bench = make_bench(max_num_seqs=1)
    for request in [bench.request(prompt_of(i, 4), max_tokens=90, deadline=0.05) for i in range(3)]:
        bench.engine.submit(request)
    finishes = []
    while bench.engine.has_work:
        finishes += [output.finish for output in bench.engine.step() if output.finish]
        bench.clock.now += 0.01
    assert finishes == [Finish.DEADLINE] * 3
    assert bench.kv.pool.used == 0


def test_a_full_queue_refuses() -> None:
    bench = make_bench(max_waiting=2)
    requests = [bench.request(prompt_of(i, 4)) for i in range(3)]
    refusals = [bench.engine.submit(request) for request in requests]
    assert refusals[:2] == [None, None]
    assert refusals[2].finish is Finish.REFUSED
    assert bench.engine.submit(requests[0]).finish is Finish.REFUSED


def test_one_request_that_breaks_the_model_fails_alone() -> None:
    bench = make_bench()
    poison = 7

    def explode(plan: StepPlan) -> None:
        rows = {init.row for init in plan.inits if poison in init.token_ids} | bad_rows
        bad_rows.update(rows)
        if any(work.row in bad_rows for work in plan.work):
            bad_rows.difference_update(work.row for work in plan.work)
            raise ValueError("kernel failed")

    bad_rows: set[int] = set()
    bench.runner.on_launch = explode
    requests = [bench.request(prompt_of(i, 6) if i != 2 else [poison] * 6) for i in range(5)]
    emitted = bench.run(requests)
    for index, request in enumerate(requests):
        if index == 2:
            assert request.finish is Finish.ERROR
        else:
            assert emitted[request.attempt_id] == undisturbed(request.tokens[:6], 8)
    assert bench.kv.pool.used == 0


def test_eight_failed_steps_in_a_row_end_the_replica() -> None:
    bench = make_bench()

    def fail(plan: StepPlan) -> None:
        raise ValueError("kernel failed")

    def fail_steps(count: int) -> None:
        for index in range(count):
            request = bench.request(prompt_of(index, 4))
            bench.run([request])
            assert request.finish is Finish.ERROR

    bench.runner.on_launch = fail
    fail_steps(7)
    bench.runner.on_launch = lambda plan: None
    request = bench.request(prompt_of(7, 4))
    bench.run([request])  # the count starts again
    assert request.finish is Finish.LENGTH
    bench.runner.on_launch = fail
    fail_steps(7)
    with pytest.raises(RunnerBrokenError, match="8 steps in a row failed"):
        fail_steps(1)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_long_step_counts_as_long_while_it_is_waited_for(depth: int) -> None:
    """A shorter one may be planned before: what bounds the wait must not be the shorter one's prediction."""
    bench = make_bench(depth=depth)
    for tokens in (1, 32) * 9:  # a token takes a second
        bench.engine.latency.observe(tokens if tokens > 1 else 0, int(tokens == 1), 0, float(tokens))
    waits: list[tuple[float, float]] = []

    def collected(plan: StepPlan) -> None:
        waits.append((bench.engine.longest_step, sum(work.count for work in plan.work)))

    bench.runner.on_collect = collected
    bench.run([bench.request(prompt_of(1, 30), max_tokens=6)])
    assert waits[0][0] > 20 and waits[0][1] == 30
    assert waits[-1][0] < 2 and waits[-1][1] == 1


@pytest.mark.parametrize("depth", [1, 2])
def test_results_of_steps_launched_after_a_failed_one_are_never_emitted(depth: int) -> None:
    """The failure is detected when the step is collected; the next ones have used its KV and tokens by then."""
    bench = make_bench(depth=depth)
    discarded: set[int] = set()

    deliver = bench.runner.collect

    def collect(handle: Any) -> StepResult:
        result = deliver(handle)
        if result.step in (4, 11) and result.step not in discarded:
            discarded.update(range(result.step + 1, bench.runner.steps + 1))
            raise ValueError("kernel failed")
        return StepResult(result.step, [1] * len(result.tokens), {}, {}) if result.step in discarded else result

    bench.runner.collect = collect
    requests = [bench.request(prompt_of(index, 6), max_tokens=12) for index in range(3)]
    emitted = bench.run(requests)
    assert discarded
    for request in requests:
        assert emitted[request.attempt_id] == undisturbed(request.tokens[:6], 12)


def test_continued_outputs_keep_their_index() -> None:
    bench = make_bench()
    prompt = prompt_of(4, 9)
    tokens = undisturbed(prompt, 10)
    request = bench.request(prompt)
    request.tokens = prompt + tokens[:4]
    request.max_len = len(prompt) + 10
    bench.engine.submit(request)
    indexes, got = [], []
    while bench.engine.has_work:
        for output in bench.engine.step():
            indexes.append(output.first_index)
            got += output.token_ids
    assert got == tokens[4:]
    assert indexes == list(range(4, 10))


@pytest.mark.parametrize(
    ("seed", "batches"), [(seed, 1) for seed in range(60)] + [(seed, 2 + seed % 3) for seed in range(100, 160)]
)
def test_random_schedules(seed: int, batches: int) -> None:
    """Shared prefixes, cancels, deadlines, tiny pools, any depth: tokens, conservation, and an end of every request."""
    random = Random(seed)
    windows = random.choice([(0,), (0, 5), (9,), (4, 0)])
    longest = 40
    # Every group must be able to hold the longest request alone.
    blocks = 1 + len(windows) * (longest // 4 + 1) + random.randrange(1, 60)
    bench = make_bench(
        windows=windows,
        num_blocks=blocks,
        max_num_seqs=random.randrange(1, 9),
        budget=random.choice([3, 7, 16, 50]),
        depth=random.randrange(3),
        batches=batches,
    )
    stems = [prompt_of(1000 + i, 16) for i in range(3)]
    emitted: dict[bytes, list[int]] = {}
    requests: list[Any] = []
    ends: dict[Any, Any] = {}
    for turn in range(150):
        if random.random() < 0.4 and turn < 120:
            stem = random.choice(stems)[: random.randrange(17)]
            prompt = stem + prompt_of(random.randrange(5), random.randrange(1, 8))
            deadline = bench.clock.now + 0.2 if random.random() < 0.1 else None
            request = bench.request(prompt, random.randrange(1, 16), priority=random.randrange(3), deadline=deadline)
            requests.append(request)
            assert bench.engine.submit(request) is None
        if requests and random.random() < 0.1:
            output = bench.engine.cancel(random.choice(requests).attempt_id)
            if output is not None:
                ends[output.attempt_id] = ends.get(output.attempt_id, 0) + 1
        for output in bench.engine.step():
            emitted.setdefault(output.attempt_id, []).extend(output.token_ids)
            ends[output.attempt_id] = ends.get(output.attempt_id, 0) + (output.finish is not None)
        bench.scheduler.check()
        bench.clock.now += 0.01
    while bench.engine.has_work:
        for output in bench.engine.step():
            emitted.setdefault(output.attempt_id, []).extend(output.token_ids)
            ends[output.attempt_id] = ends.get(output.attempt_id, 0) + (output.finish is not None)
        bench.scheduler.check()
    for request in requests:
        assert ends[request.attempt_id] == 1
        tokens = emitted.get(request.attempt_id, [])
        reference = undisturbed(request.tokens[: request.prompt_len], request.max_len - request.prompt_len)
        assert tokens == reference[: len(tokens)]
        if request.finish is Finish.LENGTH:
            assert tokens == reference
    assert bench.kv.pool.used == 0
    seen: set[bytes] = set()
    for change in bench.engine.take_cache_changes():
        (seen.add if change.stored else seen.discard)(change.digest)
    assert seen == bench.indexed_digests


def test_the_latest_arrivals_are_preempted() -> None:
    bench = make_bench(num_blocks=1 + 12, budget=64)  # three requests of six blocks each
    requests = [bench.request(prompt_of(i, 8), max_tokens=16, arrival=float(i)) for i in range(3)]
    bench.run(requests)
    assert requests[0].preemptions == 0 and requests[2].preemptions > 0


def test_a_preempted_request_is_admitted_before_later_arrivals() -> None:
    bench = make_bench(num_blocks=1 + 8, budget=64, max_num_seqs=2)
    first, second = (bench.request(prompt_of(i, 8), max_tokens=16, arrival=float(i)) for i in range(2))
    third = bench.request(prompt_of(2, 4), max_tokens=2, arrival=2.0)  # fits where the second one does not
    ends: list[bytes] = []
    for request in (first, second, third):
        bench.engine.submit(request)
    while bench.engine.has_work:
        ends += [output.attempt_id for output in bench.engine.step() if output.finish]
    assert second.preemptions > 0
    assert ends[0] == first.attempt_id, "the third did not take the blocks that the second one waits for"

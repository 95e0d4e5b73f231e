"""Recurrent state: which snapshots are kept, what starts from them, and random schedules of all of it."""

import os
from random import Random
from typing import Any

import pytest

from headrace_worker.core.kv.blocks import BlockPool, Content
from headrace_worker.core.kv.states import SLOTS_PER_ROW
from headrace_worker.core.plan import StepPlan
from headrace_worker.core.request import Request
from support.worker.engine_bench import Bench, make_bench
from support.worker.fake_model import undisturbed

SCHEDULES = int(os.environ.get("HEADRACE_SIMULATION_SEEDS", 0)) or 150
SYSTEM = [Random(1).randrange(10, 900) for _ in range(30)]


def answered(bench: Bench, prompt: list[int], count: int = 9) -> tuple[Request, list[int]]:
    """A request that ran alone, and its answer, which is right."""
    request = bench.request(prompt, count)
    tokens = bench.run([request])[request.attempt_id]
    assert tokens == undisturbed(prompt, count)
    return request, tokens


def bench_of(**options: Any) -> Bench:
    defaults: dict[str, Any] = {"num_blocks": 512, "state_slots": 64, "max_num_seqs": 4}
    bench: Bench = make_bench(**defaults | options)
    return bench


def test_the_next_turn_starts_at_the_end_of_the_answer() -> None:
    bench = bench_of()
    prompt = [*SYSTEM, 7, 8, 9]  # 33 tokens; blocks of 4
    _, answer = answered(bench, prompt)  # 42 tokens, the last one not computed
    follow, _ = answered(bench, prompt + answer + [5, 6, 7, 8, 9])
    assert follow.cached_tokens == 40
    assert (follow.times.snapshot_tokens, follow.times.covered_tokens) == (40, 40)


def test_a_turn_without_the_reasoning_starts_in_the_prompt() -> None:
    """A block before its end at least: the tokens that open the answer are others in the next turn."""
    bench = bench_of()
    prompt = [*SYSTEM, 7, 8]
    _, answer = answered(bench, prompt)
    follow, _ = answered(bench, prompt[:-1] + answer[5:])
    assert follow.cached_tokens == 24
    assert follow.times.covered_tokens == 28, "the attention layers alone could start later"


def test_the_third_request_starts_where_the_second_one_parted() -> None:
    bench = bench_of()
    tails = [[number] * 11 for number in (11, 12, 13, 14)]
    hits = [answered(bench, SYSTEM + tail)[0].cached_tokens for tail in tails]
    assert hits == [0, 0, 28, 28]


@pytest.mark.parametrize("depth", [0, 1])
def test_a_burst_parts_where_its_first_request_keeps_a_state(depth: int) -> None:
    bench = bench_of(depth=depth, budget=64)
    requests = [bench.request(SYSTEM + [number] * 11, 3) for number in (11, 12, 13)]
    emitted = bench.run(requests)
    assert [request.cached_tokens for request in requests] == [0, 28, 28]
    for request in requests:
        assert emitted[request.attempt_id] == undisturbed(request.tokens[: request.prompt_len], 3)


def test_choices_of_one_prompt_start_from_its_state() -> None:
    bench = bench_of(budget=64)
    requests = [bench.request([*SYSTEM, 7, 8, 9], 3) for _ in range(3)]
    bench.run(requests)
    assert [request.cached_tokens for request in requests] == [0, 32, 32]


def test_a_preempted_request_goes_on_from_its_answer() -> None:
    bench = bench_of()
    request = bench.request(SYSTEM, 12)
    bench.engine.submit(request)
    emitted: dict[bytes, list[int]] = {request.attempt_id: []}
    while len(request.tokens) < 39:
        for output in bench.engine.step():
            emitted[request.attempt_id].extend(output.token_ids)
    bench.scheduler._preempt(request)
    bench.scheduler.check()
    step = bench.scheduler.schedule()
    assert step is not None and step.plan.work[0].start == 36
    bench.scheduler.fail(step, "not run")
    bench.step_until_idle(emitted)


def test_an_answer_keeps_its_newest_state_alone() -> None:
    bench = bench_of()
    answered(bench, SYSTEM, 30)
    states = bench.kv.states
    assert states is not None
    assert states.pool.cached == 2, "one of the prompt, one of the answer"


def test_a_superseded_turn_is_evicted_first() -> None:
    """A conversation does not evict what others start from: its older turns go first."""
    bench = bench_of(state_slots=9, max_num_seqs=1)
    other = [Random(2).randrange(10, 900) for _ in range(20)]
    answered(bench, other)
    history = list(SYSTEM)
    for turn in range(5):
        _, answer = answered(bench, history)
        history += answer + [turn] * 9
    assert answered(bench, other + [3] * 5)[0].cached_tokens == 12


def tokens(random: Random, count: int) -> list[int]:
    return [random.randrange(10, 900) for _ in range(count)]


def drain(bench: Bench) -> None:
    while bench.engine.has_work:
        bench.engine.step()
        bench.scheduler.check()


def test_a_prompt_that_was_preempted_starts_again_when_all_of_it_fits() -> None:
    """Beside a stream that grows: the blocks of its first chunk would be free again, and again be too few."""
    random = Random(1)
    bench = bench_of(num_blocks=101, budget=32)
    stream, prompt = bench.request(tokens(random, 100), 200), bench.request(tokens(random, 300), 4)
    bench.engine.submit(stream)
    for _ in range(10):
        bench.engine.step()
    bench.clock.now = prompt.arrival = 1.0
    bench.engine.submit(prompt)
    drain(bench)
    assert stream.finish is not None and prompt.preemptions <= 2


def test_a_long_prompt_goes_on_from_its_newest_chunk() -> None:
    """Another tenant's requests preempt it: it is not starved, and leaves one snapshot more than others."""
    random = Random(1)
    bench = bench_of(num_blocks=2001, max_num_seqs=2, budget=32)
    stream = bench.request(tokens(random, 20), 3000, salt=b"a", tenant_salt=b"a")
    prompt = bench.request(tokens(random, 600), 4, salt=b"a", tenant_salt=b"a", arrival=1.0)
    bench.engine.submit(stream)
    bench.engine.step()
    bench.engine.submit(prompt)
    for step in range(200):
        if step % 12 == 11:
            bench.engine.submit(bench.request(tokens(random, 12), 2, tenant_salt=b"b", arrival=2.0 + step))
        bench.engine.step()
        bench.scheduler.check()
    assert prompt.finish is not None and prompt.preemptions > 1
    bench.engine.cancel(stream.attempt_id)
    drain(bench)
    states = bench.kv.states
    assert states is not None
    assert bench.kv.lookup(prompt.chain, 600).tokens == 600 and bench.kv.lookup(prompt.chain, 591).tokens == 0


def test_followers_wait_for_no_snapshot_that_has_no_room() -> None:
    bench = bench_of(max_num_seqs=16, state_slots=1 + 2 * 16, budget=256)
    history = [*SYSTEM, 7]
    _, answer = answered(bench, history)
    for _ in range(8):
        bench.engine.submit(bench.request([3] * 9, 100))
    for _ in range(5):
        bench.engine.step()
    turns = [bench.request([*history, *answer, *SYSTEM], 1) for _ in range(6)]
    for turn in turns:
        bench.engine.submit(turn)
    for _ in range(4):
        bench.engine.step()
    assert all(turn.finish is not None for turn in turns)


def test_doubtful_states_are_forgotten() -> None:
    bench = bench_of()
    request, _ = answered(bench, SYSTEM)
    states = bench.kv.states
    assert states is not None and states.pool.cached
    bench.kv.forget(bench.kv.new_table(bench.kv.lookup(request.chain, 0)), request.chain)
    assert not states.pool.cached and bench.kv.lookup(request.chain, 28).tokens == 0
    assert bench.kv.lookup(request.chain, 28).covered == 28


def test_changes_of_snapshots_are_reported_as_their_group() -> None:
    bench = bench_of()
    answered(bench, SYSTEM)
    changes = [change for change in bench.engine.take_cache_changes() if change.group == 1]
    stored = {change.digest for change in changes if change.stored} - {
        change.digest for change in changes if not change.stored
    }
    states = bench.kv.states
    assert states is not None and stored == set(states.pool._by_digest) and len(stored) == 2


def test_a_pool_discards_and_orders_its_evictions() -> None:
    pool = BlockPool(4)
    kept = pool.allocate(3)

    for block in kept:
        assert pool.publish(block, Content(0, bytes([block]), b"t"))
        assert not pool.publish(block, Content(0, b"other", b"t"))
    pool.release(kept[:2])
    pool.evict_next(bytes([kept[0]]))
    pool.evict_next(bytes([kept[2]]))  # in use: nothing happens
    pool.discard(b"unknown")
    pool.discard(bytes([kept[2]]))
    pool.check()
    assert pool.find(bytes([kept[2]]), b"t") is None and pool.cached == 2
    assert pool.allocate(1) == [kept[0]]
    pool.discard(bytes([kept[1]]))
    pool.check()
    assert pool.cached == 0 and pool.available == 1


def random_schedule(seed: int) -> tuple[int, int]:
    """Turns, branches, cancelled, preempted and failing requests. Returns hits of states, and requests."""
    random = Random(seed)
    rows = random.choice((1, 2, 4))
    windows = random.choice(((0,), (0,), (0, 6), (9,)))
    bench: Bench = make_bench(
        windows=windows,
        num_blocks=1 + len(windows) * random.choice((14, 20, 60)),
        max_num_seqs=rows,
        budget=random.choice((4, 9, 16, 40)),
        depth=random.choice((0, 0, 1, 2)),
        batches=random.choice((1, 1, 1, 2)),
        state_slots=1 + SLOTS_PER_ROW * rows + random.choice((0, 1, 3, 10)),
    )
    stems = [[random.randrange(10, 900) for _ in range(20)] for _ in range(2)]
    histories: list[list[int]] = []
    requests: list[Request] = []
    emitted: dict[bytes, list[int]] = {}
    failing = {random.randrange(1, 40) for _ in range(random.choice((0, 0, 2)))}

    def on_launch(plan: StepPlan) -> None:
        if plan.step in failing and plan.work and len(plan.work) > 1:
            failing.discard(plan.step)
            raise RuntimeError("kernel failed")

    bench.runner.on_launch = on_launch
    for _ in range(400):
        if len(requests) < 9 and random.random() < 0.3:
            if histories and random.random() < 0.6:
                prompt = random.choice(histories)[: random.choice((30, 60))]
            else:
                prompt = random.choice(stems)[: random.choice((8, 17, 20))]
            prompt = (prompt + [random.randrange(10, 900) for _ in range(random.randrange(1, 9))])[-40:]
            request = bench.request(prompt, random.randrange(1, 12))
            requests.append(request)
            assert bench.engine.submit(request) is None
        if bench.scheduler.running and random.random() < 0.03:
            bench.scheduler._preempt(random.choice(bench.scheduler.running))
        if requests and random.random() < 0.02:
            bench.engine.cancel(random.choice(requests).attempt_id)
        for output in bench.engine.step():
            emitted.setdefault(output.attempt_id, []).extend(output.token_ids)
        bench.scheduler.check()
        for request in requests:
            tokens = emitted.get(request.attempt_id, [])
            if request.finish is not None and tokens and request.tokens not in histories:
                histories.append(list(request.tokens))
        if len(requests) == 9 and not bench.engine.has_work:
            break
    bench.step_until_idle(emitted)
    for request in requests:
        prompt, tokens = request.tokens[: request.prompt_len], emitted.get(request.attempt_id, [])
        assert tokens == undisturbed(prompt, len(tokens)), "a hit differs from a fresh run"
    states = bench.kv.states
    assert states is not None and states.pool.used == bench.kv.pool.used == 0
    return sum(request.times.snapshot_tokens > 0 for request in requests), len(requests)


def test_no_schedule_reads_the_state_of_another_prefix() -> None:
    hits = total = 0
    for seed in range(SCHEDULES):
        try:
            found, requests = random_schedule(seed)
        except Exception as error:
            raise AssertionError(f"schedule {seed}: {error!r}") from error
        hits, total = hits + found, total + requests
    assert total > 4 * SCHEDULES and hits > total // 8, f"{hits} of {total} requests started from a snapshot"


@pytest.mark.parametrize("seed", range(200))
def test_the_longest_prefix_of_groups_with_windows_and_states(seed: int) -> None:
    """Of random blocks and snapshots: what the definition finds, prefix by prefix."""
    random = Random(seed)
    windows = random.choice([(0,), (8,), (0, 8), (6, 0, 17), (8, 24)])
    recurrent, blocks, size = random.random() < 0.5, 20, 4
    kv = bench_of(windows=windows, state_slots=64 if recurrent else 0).kv
    tokens = [random.randrange(9) for _ in range(blocks * size)]
    chain = kv.start_chain(b"", "")
    kv.extend_chain(chain, tokens, blocks)
    stored: set[tuple[int, int]] = set()
    for group in range(len(windows)):
        share = random.choice([0.8, 0.95, 1.0])
        for index in range(blocks):
            if random.random() < share:
                kv.publish_blocks(chain, group, index, kv.pool.allocate(1))
                stored.add((group, index))
    snapshots = {index for index in range(1, blocks + 1) if recurrent and random.random() < 0.3}
    for index in snapshots:
        slot = kv.states.reserve() if kv.states is not None else None
        assert slot is not None
        kv.publish_state(chain, index, slot, len(tokens))

    def attended(count: int) -> bool:
        first = [max(0, count * size - window + 1) // size if window else 0 for window in windows]
        return all((group, index) in stored for group, low in enumerate(first) for index in range(low, count))

    covered = next(count for count in range(blocks, -1, -1) if attended(count))
    whole = [count for count in range(covered, 0, -1) if attended(count) and (not recurrent or count in snapshots)]
    hit = kv.lookup(chain, len(tokens))
    assert (hit.tokens, hit.covered) == ((whole[0] if whole else 0) * size, covered * size)
    assert bool(hit.snapshot) == bool(recurrent and whole)

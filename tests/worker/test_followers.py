"""Requests with a prompt that is being computed start from its blocks, instead of computing it again."""

from random import Random

import pytest

from support.worker.engine_bench import make_bench
from support.worker.fake_model import undisturbed

PROMPT = [Random(1).randrange(10, 900) for _ in range(41)]


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("budget", [16, 64])
@pytest.mark.parametrize("windows", [(0,), (0, 6)])
def test_a_burst_of_equal_prompts_computes_one(depth: int, budget: int, windows: tuple[int, ...]) -> None:
    bench = make_bench(windows=windows, num_blocks=512, budget=budget, depth=depth)
    siblings = [bench.request(PROMPT) for _ in range(8)]
    other = bench.request([7] * 9)
    emitted = bench.run([*siblings, other])
    for request in siblings:
        assert emitted[request.attempt_id] == undisturbed(PROMPT, 8)
    assert [request.cached_tokens for request in siblings] == [0, *[40] * 7]
    assert emitted[other.attempt_id] == undisturbed([7] * 9, 8)


def test_prompts_that_share_a_beginning_wait_for_it_alone() -> None:
    bench = make_bench(num_blocks=256, budget=64)
    ends = [bench.request(PROMPT[:20] + [number] * 9) for number in range(11, 15)]
    bench.run(ends)
    assert [request.cached_tokens for request in ends] == [0, 20, 20, 20]


def test_others_do_not_wait_behind_a_follower() -> None:
    bench = make_bench(num_blocks=256, budget=64)
    leader, follower, other = bench.request(PROMPT), bench.request(PROMPT), bench.request([9] * 5)
    for request in (leader, follower, other):
        bench.engine.submit(request)
    bench.engine.step()
    assert leader.row >= 0 and follower.row < 0 and other.row >= 0
    assert len(bench.scheduler.waiting) == 1


@pytest.mark.parametrize("ends", ["cancelled", "preempted"])
def test_a_follower_does_not_wait_for_a_leader_that_stops(ends: str) -> None:
    bench = make_bench(num_blocks=256, budget=8)
    leader, follower = bench.request(PROMPT), bench.request(PROMPT)
    for request in (leader, follower):
        bench.engine.submit(request)
    bench.engine.step()
    bench.engine.step()
    assert follower.row < 0
    if ends == "cancelled":
        bench.engine.cancel(leader.attempt_id)
    else:
        bench.scheduler._preempt(leader)
    emitted: dict[bytes, list[int]] = {}
    bench.step_until_idle(emitted)
    assert emitted[follower.attempt_id] == undisturbed(PROMPT, 8)
    assert bench.kv.pool.used == 0

"""A tenant's flood of admitted requests does not delay another tenant's first token."""

from random import Random
from statistics import median
from typing import Any

import pytest

from headrace_worker.core.request import Finish, Request
from headrace_worker.core.transfer.messages import FetchRequest, Granted
from headrace_worker.core.transfer.orders import Connect
from support.worker.engine_bench import make_bench
from support.worker.fake_model import undisturbed

FLOOD, OTHER = b"flood", b"other"


def prompt_of(seed: int, length: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(10, 900) for _ in range(length)]


def make(bench: Any, tenant: bytes, seed: int, length: int, max_tokens: int = 8, **options: Any) -> Request:
    made: Request = bench.request(prompt_of(seed, length), max_tokens, salt=tenant, tenant_salt=tenant, **options)
    return made


def steps_until_output(bench: Any, request: Request) -> int:
    assert bench.engine.submit(request) is None
    for step in range(1, 1000):
        bench.clock.now += 0.01
        outputs = bench.engine.step()
        bench.scheduler.check()
        if any(output.attempt_id == request.attempt_id and output.token_ids for output in outputs):
            return step
    raise AssertionError("the request has no output")


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize(
    ("length", "answer", "blocks"),
    [(12, 100, 4096), (200, 2, 4096), (200, 100, 4096), (100, 40, 300)],
    ids=["long answers", "long prompts", "both", "little memory"],
)
def test_the_first_token_of_another_tenant_is_not_delayed(depth: int, length: int, answer: int, blocks: int) -> None:
    def first_tokens(flood: int) -> list[int]:
        bench = make_bench(num_blocks=blocks, max_num_seqs=8, budget=32, depth=depth)
        for seed in range(flood):
            bench.engine.submit(make(bench, FLOOD, seed, length, answer))
        for _ in range(30):
            bench.engine.step()
        found: list[int] = []
        for seed in range(10):
            request = make(bench, OTHER, 1000 + seed, 40, 3)
            found.append(steps_until_output(bench, request))
            while request.finish is None:
                bench.engine.step()
            for _ in range(5):
                bench.engine.step()
        return found

    idle, flooded = first_tokens(0), first_tokens(60)
    assert median(flooded) <= 2 * median(idle) + 2
    assert max(flooded) <= 2 * max(idle) + 2


@pytest.mark.parametrize("depth", [0, 1])
def test_tokens_stay_those_of_the_undisturbed_run(depth: int) -> None:
    bench = make_bench(num_blocks=60, max_num_seqs=4, budget=16, depth=depth)
    requests = [make(bench, bytes([seed % 5]), seed, 3 + seed * 7 % 40, 1 + seed % 9) for seed in range(40)]
    emitted = bench.run(requests)
    for request in requests:
        prompt = request.tokens[: request.prompt_len]
        assert emitted[request.attempt_id] == undisturbed(prompt, request.max_len - request.prompt_len)
        assert request.finish is Finish.LENGTH


def test_tenants_with_equal_loads_get_equal_tokens() -> None:
    """One sends long prompts, one short ones: each gets half of the computed positions, not half of the turns."""
    bench = make_bench(num_blocks=4096, max_num_seqs=4, budget=32)
    sizes = {b"long": 96, b"short": 12}
    for tenant, size in sizes.items():
        for seed in range(400):
            bench.engine.submit(make(bench, tenant, seed, size, 1))
    computed = dict.fromkeys(sizes, 0)
    for _ in range(100):
        bench.engine.step()
    for tenant, size in sizes.items():
        waiting = sum(request.tenant_salt == tenant for request in bench.scheduler.waiting)
        computed[tenant] = (400 - waiting) * size
    assert 0.7 < computed[b"long"] / computed[b"short"] < 1.5


def test_priorities_order_the_requests_of_a_tenant_and_no_others() -> None:
    """The most urgent ones of a flood do not delay the least urgent one of another tenant."""
    bench = make_bench(max_num_seqs=1)
    first = make(bench, FLOOD, 1, 8)
    bench.engine.submit(first)
    bench.engine.step()
    for priority in (-3, -9, 7, -5):
        bench.engine.submit(make(bench, FLOOD, priority + 20, 8, priority=priority))
    for priority in (5, 1):
        bench.engine.submit(make(bench, OTHER, priority, 8, priority=priority))
    order: list[int] = []
    while bench.engine.has_work:
        bench.engine.step()
        order += [request.priority for request in bench.scheduler.running if request is not first]
    ended = list(dict.fromkeys(order))
    assert [one for one in ended if one in (1, 5)] == [1, 5]
    assert [one for one in ended if one not in (1, 5)] == [-9, -5, -3, 7]
    assert ended.index(1) <= 1 and ended.index(5) <= 3


def test_the_least_urgent_request_of_the_tenant_with_most_is_preempted_whatever_its_priority() -> None:
    bench = make_bench(max_num_seqs=3)
    running = [make(bench, FLOOD, seed, 8, 30, priority=priority) for seed, priority in enumerate((-9, -7, -8))]
    for request in running:
        bench.engine.submit(request)
    bench.engine.step()
    other = make(bench, OTHER, 5, 8, priority=100)
    bench.engine.submit(other)
    bench.engine.step()
    assert [request.preemptions for request in running] == [0, 1, 0] and other.row >= 0


def test_a_request_is_not_preempted_for_a_more_urgent_one_of_its_own_tenant() -> None:
    bench = make_bench(max_num_seqs=2)
    for seed in range(2):
        bench.engine.submit(make(bench, FLOOD, seed, 8, 30))
    bench.engine.step()
    bench.engine.submit(make(bench, FLOOD, 6, 8, priority=-5))
    for _ in range(10):
        bench.engine.step()
    assert bench.scheduler.counters.preemptions == 0


def test_a_full_queue_has_a_place_for_another_tenant() -> None:
    bench = make_bench(max_num_seqs=1, max_waiting=4)
    accepted = [bench.engine.submit(make(bench, FLOOD, seed, 8)) is None for seed in range(6)]
    assert accepted == [True] * 4 + [False] * 2
    accepted = [bench.engine.submit(make(bench, OTHER, seed, 8)) is None for seed in range(6)]
    assert accepted == [True] * 2 + [False] * 4
    accepted = [bench.engine.submit(make(bench, bytes([seed]), seed, 8)) is None for seed in range(6)]
    assert accepted == [True] * 2 + [False] * 4  # at most twice the limit


def test_grants_of_one_tenant_leave_places_to_another() -> None:
    granter = make_bench(num_blocks=4096).engine.exchange.granter
    granter.connect("there", Connect(1, (), (), reads=False))
    places = granter.limits.max_grants

    def granted(tenant: bytes, count: int) -> int:
        for number in range(count):
            fetch = FetchRequest(len(tenant) * 1000 + number, tenant, "", prompt_of(number, 8), 0)
            granter.receive("there", fetch)
        answers, granter.messages = granter.messages, []
        return sum(isinstance(answer, Granted) for _, answer in answers)

    assert granted(b"a", places + 10) == places
    assert granted(b"bb", places) == places // 2
    assert granted(b"a", 1) == 0

"""KV blocks that leave the cache for host memory and come back: one engine, whose copies the test makes."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from headrace_worker.core.kv.blocks import CacheChange
from headrace_worker.core.plan import StepPlan
from headrace_worker.core.request import Finish, Request
from headrace_worker.core.transfer.offload import HostSlots
from headrace_worker.core.transfer.orders import ChunkRead, Load, Store
from support.worker.engine_bench import make_bench

SIZE = 4


class Host:
    """Makes the copies of an engine, some later than their orders."""

    def __init__(self, bench: Any, random: Random | None = None) -> None:
        self.bench, self.random = bench, random
        self.memory: dict[tuple[int, int, int], Any] = {}
        self.pending: list[Load | Store] = []
        self.good = True
        self.seconds = 0.0  # that each copy takes
        self.changes: list[CacheChange] = []
        self.emitted: dict[bytes, list[int]] = {}
        bench.runner.on_launch = self._launched

    def _launched(self, plan: StepPlan) -> None:
        self.pending += [order for order in plan.orders if isinstance(order, Load | Store)]

    def step(self) -> None:
        for output in self.bench.engine.step():
            self.emitted.setdefault(output.attempt_id, []).extend(output.token_ids)
        exchange = self.bench.engine.exchange
        self.bench.scheduler.check(exchange.held())
        while self.pending and (self.random is None or self.random.random() < 0.5):
            order = self.pending.pop(0)
            self._copy(order)
            self.bench.clock.now += self.seconds
            exchange.handle_report(ChunkRead(0, order.fetch, 0, self.good))
            self.bench.scheduler.check(exchange.held())
        self.changes += self.bench.engine.take_cache_changes()
        self.bench.clock.now += 0.01

    def _copy(self, order: Load | Store) -> None:
        slots = self.bench.runner.slots
        for group, (blocks, places) in enumerate(zip(order.blocks, order.slots, strict=True)):
            for block, place in zip(blocks, places, strict=True):
                for offset in range(SIZE):
                    if isinstance(order, Store):
                        self.memory[group, place, offset] = slots[group, block, offset]
                    else:
                        slots[group, block, offset] = self.memory[group, place, offset]

    def run(self, *requests: Request) -> dict[bytes, list[int]]:
        """Until the engine is idle; the tokens of all requests by then."""
        for request in requests:
            assert self.bench.engine.submit(request) is None
        for _ in range(4000):
            self.step()
            if not self.bench.engine.has_work and not self.bench.engine.exchange.busy:
                return self.emitted
        raise AssertionError("no end")


def prompt(seed: int, length: int = 41) -> list[int]:
    random = Random(seed)
    return [random.randrange(10, 900) for _ in range(length)]


@pytest.fixture
def make_host() -> Callable[..., Host]:
    def make(random: Random | None = None, **options: Any) -> Host:
        return Host(make_bench(**{"num_blocks": 41, "host_slots": 200} | options), random)

    return make


@pytest.mark.parametrize("windows", [(0,), (0, 8), (8,)])
def test_a_prompt_that_was_evicted_comes_back(make_host: Callable[..., Host], windows: tuple[int, ...]) -> None:
    host = make_host(windows=windows, num_blocks=81 * len(windows), host_slots=1000)
    bench = host.bench
    first = bench.request(prompt(1), 4)
    wanted = host.run(first)[first.attempt_id]
    for seed in range(2, 20):
        host.run(bench.request(prompt(seed), 4))
    kept = bench.kv.lookup(first.chain, 40).tokens
    again = bench.request(prompt(1), 4)
    assert host.run(again)[again.attempt_id] == wanted
    assert kept < 40 <= again.cached_tokens, "it was evicted, and nothing of it is computed again"
    counters = bench.engine.load().offload
    assert counters.stored > 0 and counters.loaded > 0


def test_others_are_told_when_a_block_has_left_both(make_host: Callable[..., Host]) -> None:
    host = make_host(host_slots=12)
    for seed in range(12):
        host.run(host.bench.request(prompt(seed), 2))
    known: set[bytes] = set()
    for change in host.changes:
        (known.add if change.stored else known.discard)(change.digest)
    slots: HostSlots = host.bench.engine.exchange.offload.slots
    assert known == host.bench.indexed_digests | set(slots._by_digest)
    assert len(slots) == 12


def test_a_load_that_takes_longer_than_computing_is_not_tried_again(make_host: Callable[..., Host]) -> None:
    host = make_host()
    host.run(host.bench.request(prompt(1)))
    for seed in range(2, 9):
        host.run(host.bench.request(prompt(seed)))
    offload = host.bench.engine.exchange.offload
    host.seconds = 1.0
    request = host.bench.request(prompt(1))
    assert offload.begin(request, 1e-3, 0), "the speed is not known yet"
    host.run(host.bench.request(prompt(50)))
    for seed in range(2, 9):
        host.run(host.bench.request(prompt(seed)))
    assert not offload.begin(host.bench.request(prompt(1)), 1e-3, 0)
    assert offload.begin(host.bench.request(prompt(1)), 1.0, 0)


def test_a_copy_that_fails_costs_time_only(make_host: Callable[..., Host]) -> None:
    host = make_host()
    first = host.bench.request(prompt(1), 4)
    wanted = host.run(first)[first.attempt_id]
    for seed in range(2, 9):
        host.run(host.bench.request(prompt(seed)))
    host.good = False
    again = host.bench.request(prompt(1), 4)
    assert host.run(again)[again.attempt_id] == wanted and again.cached_tokens < 40
    assert host.bench.kv.pool.used == 0


@pytest.mark.parametrize("seed", range(60))
def test_random_work_gives_the_same_tokens(make_host: Callable[..., Host], seed: int) -> None:
    """Copies late or at once, requests cancelled at any time, small and large host memory, full and windowed groups."""
    random = Random(seed)
    windows = random.choice([(0,), (0, 8), (8,)])
    host = make_host(
        random,
        windows=windows,
        num_blocks=random.choice((30, 60)) * len(windows),
        host_slots=random.choice((7, 40, 400)),
    )
    bench = host.bench
    bodies = [prompt(number, random.randrange(6, 60)) for number in range(6)]
    running: list[Request] = []
    for _ in range(120):
        if random.random() < 0.3:
            request = bench.request(random.choice(bodies) + prompt(random.randrange(100), random.randrange(1, 4)), 4)
            assert bench.engine.submit(request) is None
            running.append(request)
        if running and random.random() < 0.1:
            bench.engine.cancel(random.choice(running).attempt_id)
        host.step()
    host.random = None
    emitted = host.run()
    alone = make_bench(windows=windows, num_blocks=400)
    for request in running:
        if request.finish is Finish.LENGTH:
            other = alone.request(request.tokens[: request.prompt_len], 4)
            assert alone.run([other])[other.attempt_id] == emitted[request.attempt_id]
        else:
            assert request.finish is Finish.CANCELLED
    assert bench.kv.pool.used == 0 and not bench.engine.exchange.offload.slots._pins

"""KV blocks and states that leave the cache for host memory and disk, and come back: the test makes the copies."""

from collections.abc import Callable
from random import Random
from typing import Any

import pytest

from headrace_worker.core.kv.blocks import CacheChange
from headrace_worker.core.plan import StepPlan
from headrace_worker.core.request import Finish, Request
from headrace_worker.core.transfer.orders import ChunkRead, Erase, Fill, Load, Save, Store
from headrace_worker.core.transfer.slots import Slots
from support.worker.engine_bench import make_bench

SIZE = 4


class Host:
    """Makes the copies of an engine, some later than their orders."""

    def __init__(self, bench: Any, random: Random | None = None, disk: dict[int, Any] | None = None) -> None:
        """disk: by place, what an earlier engine has written."""
        self.bench, self.random = bench, random
        self.memory: dict[tuple[int, int, int], Any] = {}
        self.disk = {} if disk is None else disk
        self.pending: list[Load | Store | Save | Fill] = []
        self.good = self.disk_good = True
        self.hangs = False  # the disk
        self.seconds = 0.0  # that each copy takes
        self.changes: list[CacheChange] = []
        self.emitted: dict[bytes, list[int]] = {}
        bench.runner.on_launch = self._launched

    def _launched(self, plan: StepPlan) -> None:
        self.pending += [order for order in plan.orders if isinstance(order, Load | Store | Save | Fill)]
        for order in plan.orders:
            for place in order.places if isinstance(order, Erase) else ():
                self.disk.pop(place, None)

    def step(self) -> None:
        for output in self.bench.engine.step():
            self.emitted.setdefault(output.attempt_id, []).extend(output.token_ids)
        exchange = self.bench.engine.exchange
        self.bench.scheduler.check(exchange.held(), exchange.held_slots())
        while self.pending and (self.random is None or self.random.random() < 0.5) and not self.hangs:
            order = self.pending.pop(0)
            bad: list[int] = []
            good = self._copy(order) if isinstance(order, Load | Store) else self._file(order, bad)
            self.bench.clock.now += self.seconds
            exchange.handle_report(ChunkRead(0, order.fetch, 0, good, 0, self.seconds, tuple(bad)))
            self.bench.scheduler.check(exchange.held(), exchange.held_slots())
        self.changes += self.bench.engine.take_cache_changes()
        self.bench.clock.now += 0.01

    def _file(self, order: Save | Fill, bad: list[int]) -> bool:
        for block in order.blocks:
            content = block.group, block.digest, block.tokens
            if isinstance(order, Save):
                self.disk[block.place] = content, [self.memory[block.group, block.slot, at] for at in range(SIZE)]
                continue
            found, values = self.disk[block.place]
            if found != content:
                bad.append(block.place)
            for offset, value in enumerate(values):
                self.memory[block.group, block.slot, offset] = value
        return self.disk_good and not bad

    def _copy(self, order: Load | Store) -> bool:
        slots, states = self.bench.runner.slots, self.bench.runner.states
        for group, (blocks, places) in enumerate(zip(order.blocks, order.slots, strict=True)):
            for block, place in zip(blocks, places, strict=True):
                if group == len(self.bench.kv.windows):
                    if isinstance(order, Store):
                        self.memory[group, place, 0] = states[block]
                    else:
                        states[block] = self.memory[group, place, 0]
                    continue
                for offset in range(SIZE):
                    if isinstance(order, Store):
                        self.memory[group, place, offset] = slots[group, block, offset]
                    else:
                        slots[group, block, offset] = self.memory[group, place, offset]
        return self.good

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


def digests(slots: Slots) -> set[bytes]:
    return {content.digest for content in slots.contents()}


def check_changes(host: Host) -> None:
    """Others know what is in the cache, and what is in host memory or on disk alone."""
    known: dict[bytes, CacheChange] = {}
    for change in host.changes:
        known[change.digest] = change
    offload, cached = host.bench.engine.exchange.offload, host.bench.indexed_digests
    assert {digest for digest, change in known.items() if change.stored} == cached
    offloaded = {digest for digest, change in known.items() if change.offloaded}
    held = digests(offload.files).union(*(digests(tier.slots) for tier in offload.tiers))
    assert offloaded == held - cached


def evicted(host: Host) -> tuple[Request, list[int]]:
    """The first prompt's request and its tokens, after other prompts have taken its place in the cache."""
    first = host.bench.request(prompt(1), 4)
    wanted = host.run(first)[first.attempt_id]
    for seed in range(2, 9):
        host.run(host.bench.request(prompt(seed)))
    return first, wanted


@pytest.fixture
def make_host() -> Callable[..., Host]:
    def make(random: Random | None = None, disk: dict[int, Any] | None = None, **options: Any) -> Host:
        return Host(make_bench(**{"num_blocks": 41, "host_slots": 200} | options), random, disk)

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
    check_changes(host)
    assert len(host.bench.engine.exchange.offload.tiers[0].slots) == 12


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


@pytest.mark.parametrize(("length", "together"), [(125, 1), (501, 1), (2001, 1), (251, 8), (501, 8)])
def test_prompts_of_any_length_are_stored_before_they_are_evicted(
    make_host: Callable[..., Host], length: int, together: int
) -> None:
    """Also where a step computes, and evicts, many blocks."""
    host = make_host(num_blocks=2501, host_slots=20_000, budget=2048, max_num_seqs=8)
    prompts = [prompt(seed, length) for seed in range(8 * max(1, 2500 // length) + 8)]
    requests: list[Request] = []
    for _ in range(2):
        requests = []
        for first in range(0, len(prompts), together):
            some = [host.bench.request(each, 2) for each in prompts[first : first + together]]
            host.run(*some)
            requests += some
    tokens = sum(len(each) - 1 for each in prompts)
    assert sum(request.cached_tokens for request in requests) > 0.95 * tokens


def test_a_long_prompt_is_looked_up_in_linear_time(make_host: Callable[..., Host]) -> None:
    """Where blocks that the window sees are missing: each block is looked up once."""
    host = make_host(windows=(0, 8), num_blocks=3001, host_slots=4000, budget=512)
    host.run(host.bench.request(prompt(1, 4001), 2))
    offload = host.bench.engine.exchange.offload
    chain = host.bench.request(prompt(1, 4001)).chain
    host.bench.kv.extend_chain(chain, prompt(1, 4001), 1000)
    lookups = 0

    class Counting(Slots):
        def find(self, digest: bytes, tokens: bytes) -> int | None:
            nonlocal lookups
            lookups += 1
            return 1 if digest in set(chain.digests[0]) else None

    offload.tiers[0].slots = Counting(4000)
    host.bench.kv.pool.find = lambda digest, tokens: None
    assert not offload.begin(host.bench.request(prompt(1, 4001)), 1.0, 0)
    assert 1000 <= lookups <= 2100


def test_a_copy_that_fails_costs_time_only(make_host: Callable[..., Host]) -> None:
    host = make_host()
    _, wanted = evicted(host)
    host.good = False
    again = host.bench.request(prompt(1), 4)
    assert host.run(again)[again.attempt_id] == wanted and again.cached_tokens < 40
    assert host.bench.kv.pool.used == 0


@pytest.mark.parametrize("windows", [(0,), (0, 8), (8,)])
def test_what_is_on_disk_survives_a_restart(make_host: Callable[..., Host], windows: tuple[int, ...]) -> None:
    """Also the beginning that all prompts have, which is never evicted."""
    beginning = prompt(0, 9)
    options = {"windows": windows, "num_blocks": 81 * len(windows)}
    host = make_host(files=Slots(1000), **options)
    first = host.bench.request(beginning + prompt(1, 32), 4)
    wanted = host.run(first)[first.attempt_id]
    for seed in range(2, 20):
        host.run(host.bench.request(beginning + prompt(seed, 32), 4))
    check_changes(host)
    kept = host.bench.engine.exchange.offload.files
    assert host.bench.engine.load().offload.saved == len(kept) == len(host.disk) > 0

    contents = [(place, content) for content in kept.contents() for place in [kept.at(content.digest)[0]]]
    later = make_host(files=Slots(1000, contents), disk=host.disk, **options)
    again = later.bench.request(beginning + prompt(1, 32), 4)
    assert later.run(again)[again.attempt_id] == wanted and again.cached_tokens == 40
    counters = later.bench.engine.load().offload
    assert counters.filled >= 2 and counters.loaded == counters.filled
    check_changes(later)


def test_a_prompt_that_is_longer_than_host_memory_comes_back_from_disk_in_part(make_host: Callable[..., Host]) -> None:
    host = make_host(files=Slots(1000), host_slots=6)
    _, wanted = evicted(host)
    again = host.bench.request(prompt(1), 4)
    assert host.run(again)[again.attempt_id] == wanted and 8 <= again.cached_tokens < 40
    check_changes(host)


def test_what_cannot_be_read_from_disk_is_computed_and_forgotten(make_host: Callable[..., Host]) -> None:
    host = make_host(files=Slots(1000), host_slots=6)
    _, wanted = evicted(host)
    host.disk_good = False
    again = host.bench.request(prompt(1), 4)
    assert host.run(again)[again.attempt_id] == wanted and again.cached_tokens == 0
    check_changes(host)


def test_one_damaged_block_of_a_file_costs_what_follows_it_alone(make_host: Callable[..., Host]) -> None:
    host = make_host(files=Slots(1000), host_slots=12)
    first, wanted = evicted(host)
    files = host.bench.engine.exchange.offload.files
    place = files.at(first.chain.digests[0][6])[0]
    host.disk[place] = ("other", [])
    again = host.bench.request(prompt(1), 4)
    assert host.run(again)[again.attempt_id] == wanted and again.cached_tokens == 24
    assert all(digest in files for digest in first.chain.digests[0][:6])
    check_changes(host)


def test_a_disk_that_hangs_costs_a_request_a_limited_time(make_host: Callable[..., Host]) -> None:
    host = make_host(files=Slots(1000), host_slots=6)
    _, wanted = evicted(host)
    host.hangs = True
    again = host.bench.request(prompt(1), 4)
    assert host.bench.engine.submit(again) is None
    for _ in range(400):
        host.step()
    assert host.emitted[again.attempt_id] == wanted and host.bench.clock.now < 10
    host.hangs = False
    host.run()
    check_changes(host)


@pytest.mark.parametrize("places", [0, 1000])
def test_what_is_in_doubt_is_not_loaded_again(make_host: Callable[..., Host], places: int) -> None:
    """A request whose output is not finite: what it started from leaves host memory and the file, too."""
    host = make_host(files=Slots(places))
    first, _ = evicted(host)
    again = host.bench.request(prompt(1), 4)
    assert host.bench.engine.submit(again) is None
    while again.table is None:
        host.step()
    offload = host.bench.engine.exchange.offload
    assert again.cached_tokens == 40 and offload.tiers[0].slots.find(first.chain.digests[0][0], first.chain.packed[0])
    host.bench.kv.forget(again.table, again.chain)
    host.bench.engine.cancel(again.attempt_id)
    host.run()
    assert not any(
        digest in offload.tiers[0].slots or digest in offload.files for digest in first.chain.digests[0][:10]
    )
    assert not {entry[0][1] for entry in host.disk.values()} & set(first.chain.digests[0][:10])
    check_changes(host)


STATES = {"state_slots": 1 + 2 + 2, "max_num_seqs": 1, "host_states": 100}  # room for one request, and two snapshots


def evicted_states(host: Host) -> tuple[Request, list[int]]:
    """The first prompt's request and answer, when the snapshots of both are in host memory alone."""
    first, wanted = evicted(host)
    assert host.bench.kv.lookup(first.chain, 40).tokens == 0
    return first, wanted


@pytest.mark.parametrize("windows", [(0,), (0, 8), (8,)])
@pytest.mark.parametrize("num_blocks", [41, 400])
def test_a_state_comes_back_with_its_blocks(
    make_host: Callable[..., Host], windows: tuple[int, ...], num_blocks: int
) -> None:
    """With 400 blocks the keys and values are all there still: the state alone comes back."""
    host = make_host(windows=windows, num_blocks=num_blocks * len(windows), host_slots=1000, **STATES)
    bench = host.bench
    first, wanted = evicted_states(host)
    turn = [*first.tokens, 5, 6, 7]
    second = bench.request(turn, 4)
    host.run(second)
    assert second.cached_tokens == 44, "the newest state of the answer: all of its tokens but the last one are computed"
    alone = make_bench(windows=windows, num_blocks=400, state_slots=20, max_num_seqs=1)
    other = alone.request(turn, 4)
    assert alone.run([other])[other.attempt_id] == host.emitted[second.attempt_id]
    assert wanted == first.tokens[41:]
    again = bench.request(prompt(1), 4)
    assert host.run(again)[again.attempt_id] == wanted and again.cached_tokens == 36, "a block before the prompt's end"
    check_changes(host)


def test_the_states_of_an_earlier_turn_are_replaced_first(make_host: Callable[..., Host]) -> None:
    """Host memory keeps the state that a conversation continues from, whatever many turns have left."""
    host = make_host(num_blocks=400, **STATES | {"host_states": 6})
    other = host.bench.request(prompt(50), 4)
    host.run(other)
    history = prompt(1)
    for turn in range(8):
        request = host.bench.request(history, 4)
        host.run(request)
        history = request.tokens + prompt(100 + turn, 9)
    follow = host.bench.request([*other.tokens, 5, 6, 7], 4)
    host.run(follow)
    assert follow.cached_tokens == 44
    check_changes(host)


def test_the_progress_of_an_answer_is_not_copied(make_host: Callable[..., Host]) -> None:
    """Each state of it replaces the one before: one of the prompt is stored, and the last one of the answer."""
    host = make_host(num_blocks=400, **STATES)
    request = host.bench.request(prompt(1), 60)
    host.run(request)
    host.run(host.bench.request(prompt(2), 1), host.bench.request(prompt(3), 1))
    states = host.bench.engine.exchange.offload.tiers[1].slots
    chain = request.chain
    kept = [index + 1 for index, digest in enumerate(chain.digests[1]) if digest in states]
    assert kept == [9, 25]


def test_a_load_leaves_the_slots_of_running_requests(make_host: Callable[..., Host]) -> None:
    """Without a slot beside those of the rows no state comes back, and the prompt is computed."""
    host = make_host(num_blocks=400, **STATES | {"state_slots": 3})
    _, wanted = evicted_states(host)
    again = host.bench.request(prompt(1), 4)
    assert host.run(again)[again.attempt_id] == wanted and again.cached_tokens == 0


def test_a_state_in_doubt_is_not_loaded_again(make_host: Callable[..., Host]) -> None:
    """Also if it is in host memory alone when the request that started from it fails, or on its way to the pool."""
    host = make_host(num_blocks=400, **STATES)
    first, _ = evicted_states(host)
    tier = host.bench.engine.exchange.offload.tiers[1]
    host.random = Random(1)
    host.random.random = lambda: 1.0  # type: ignore[method-assign]  # no copy is made
    again = host.bench.request(prompt(1), 4)
    assert host.bench.engine.submit(again) is None and host.bench.engine.exchange.offload.held_slots()
    host.bench.kv.forget(host.bench.kv.new_table(host.bench.kv.lookup(first.chain, 0)), first.chain)
    host.step()
    host.random = None
    host.run()
    assert again.cached_tokens == 0 and not any(digest in tier.slots for digest in first.chain.digests[1][:8])
    check_changes(host)


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize("seed", range(90))
def test_random_work_gives_the_same_tokens(make_host: Callable[..., Host], seed: int, recurrent: bool) -> None:
    """Copies late or at once, requests cancelled at any time, small and large host memory, full and windowed groups."""
    random = Random(seed)
    windows = random.choice([(0,), (0, 8), (8,)])
    states = {"state_slots": 17 + random.choice((1, 6, 20)), "host_states": random.choice((2, 9, 90))}
    host = make_host(
        random,
        windows=windows,
        num_blocks=random.choice((30, 60)) * len(windows),
        host_slots=random.choice((7, 40, 400)),
        files=Slots(random.choice((0, 9, 80, 800)) * (not recurrent)),
        **states if recurrent else {},
    )
    bench = host.bench
    bodies = [prompt(number, random.randrange(6, 60)) for number in range(6)]
    running: list[Request] = []
    for _ in range(120):
        host.disk_good = random.random() < 0.9
        if random.random() < 0.3:
            request = bench.request(random.choice(bodies) + prompt(random.randrange(100), random.randrange(1, 4)), 4)
            assert bench.engine.submit(request) is None
            running.append(request)
        if running and random.random() < 0.1:
            bench.engine.cancel(random.choice(running).attempt_id)
        host.step()
    host.random = None
    emitted = host.run()
    alone = make_bench(windows=windows, num_blocks=400, state_slots=40 if recurrent else 0)
    for request in running:
        if request.finish is Finish.LENGTH:
            other = alone.request(request.tokens[: request.prompt_len], 4)
            assert alone.run([other])[other.attempt_id] == emitted[request.attempt_id]
        else:
            assert request.finish is Finish.CANCELLED
    offload = bench.engine.exchange.offload
    assert not any(tier.pool.used for tier in offload.tiers)
    assert not any(slots._pins for slots in (offload.files, *(tier.slots for tier in offload.tiers)))
    check_changes(host)

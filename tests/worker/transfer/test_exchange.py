"""Both sides of an engine's exchange at once; the simulation covers everything else."""

import pytest

from headrace_worker.core.plan import StepPlan
from headrace_worker.core.transfer.fetching import patience
from headrace_worker.core.transfer.granting import lease
from headrace_worker.core.transfer.messages import (
    Cancel,
    Commit,
    Done,
    FetchRequest,
    FromSource,
    Granted,
    Offer,
    Renew,
    Renewed,
)
from headrace_worker.core.transfer.orders import Announce, ChunkRead, Connect, Disconnect, End, FetchOver, Order
from support.worker.engine_bench import make_bench

TOKENS = list(range(20, 60))
SOURCE, TARGET = Connect(7, (), (), reads=True), Connect(7, (), (), reads=False)


@pytest.mark.parametrize("ends", ["done", "cancelled", "lost"])
def test_a_grants_blocks_are_held_until_the_target_answers_or_its_lease_ends(ends: str) -> None:
    """Even if the target's stream is lost: its ranks may still read."""
    bench = make_bench(depth=1)
    exchange = bench.engine.exchange
    exchange.granter.connect("there", TARGET)
    exchange.granter.receive("there", FetchRequest(1, b"", "", TOKENS, 0))
    for _ in range(8):
        bench.engine.step()
    assert bench.kv.pool.used == 10 and not bench.scheduler.running, "its request has ended"
    if ends == "lost":
        exchange.granter.peer_lost("there")
        exchange.tick()
        assert bench.kv.pool.used == 10
        bench.clock.now += lease(0.0) + 0.1
        exchange.tick()
    else:
        exchange.granter.receive("there", Done(1) if ends == "done" else Cancel(1))
    assert exchange.granter.orders == [End(7, 1), *([Disconnect(7)] if ends == "lost" else [])]
    assert bench.kv.pool.used == 0 and not len(exchange.granter)


def test_a_renewal_is_answered_and_extends_the_lease() -> None:
    bench = make_bench()
    exchange = bench.engine.exchange
    exchange.granter.connect("there", TARGET)
    exchange.granter.receive("there", FetchRequest(1, b"", "", TOKENS, 0))
    for number in range(3):
        bench.clock.now += lease(0.0) - 0.1
        exchange.granter.receive("there", Renew(number))
        assert exchange.take_outbound().to_targets[-1] == ("there", Renewed(number, 0.0))
        exchange.tick()
        assert len(exchange.granter) == 1


@pytest.mark.parametrize("late", [False, True])
def test_what_was_read_later_than_the_source_may_hold_it_is_not_used(late: bool) -> None:
    """The source stalls, its lease for this target ends, and its blocks are used again before the last read."""
    bench = make_bench()
    exchange = bench.engine.exchange
    exchange.fetcher.connect("there", SOURCE)
    assert exchange.begin(bench.request(TOKENS, source="there"), seconds_per_token=1e-3)
    exchange.fetcher.receive("there", Granted(1, 9, 0.0))
    exchange.fetcher.receive("there", Offer(1, 0, 0, 9, (tuple(range(1, 10)),), computed=True))
    exchange.fetcher.receive("there", Commit(1, 0))
    exchange.take_orders(0)
    bench.clock.now += patience(0.0) + (0.1 if late else -0.1)
    exchange.handle_report(ChunkRead(0, 1, 0, good=True))
    assert exchange.fetcher.counters.done == (not late)
    assert bench.kv.pool.cached == (0 if late else 9) and bench.kv.pool.quarantined == (9 if late else 0)
    if late:
        assert exchange.take_orders(0) == [End(7, 1)]
        exchange.handle_report(FetchOver(0, 1))
        assert bench.kv.pool.quarantined == 0


def test_renewals_that_are_answered_keep_a_long_fetch() -> None:
    bench = make_bench()
    exchange = bench.engine.exchange
    exchange.fetcher.connect("there", SOURCE)
    assert exchange.begin(bench.request(TOKENS, source="there"), seconds_per_token=0.01)
    exchange.fetcher._fetches[1].deadline = 1e9
    for _ in range(20):
        exchange.tick()
        for _, message in exchange.take_outbound().to_sources:
            if isinstance(message, Renew):
                exchange.fetcher.receive("there", Renewed(message.number, 0.0))
        bench.clock.now += 0.6
    assert len(exchange.fetcher) == 1
    bench.clock.now += patience(0.0)
    exchange.tick()
    assert not len(exchange.fetcher), "none was answered"


def test_the_time_limit_of_a_fetch_begins_again_when_the_source_computes() -> None:
    """The prompt waits there behind others; what the source had in its cache is offered before."""
    bench = make_bench()
    exchange, limits = bench.engine.exchange, bench.engine.exchange.fetcher.limits
    exchange.fetcher.connect("there", SOURCE)
    assert exchange.begin(bench.request(TOKENS, source="there"), seconds_per_token=0.1)
    fetch = exchange.fetcher._fetches[1]
    wait = limits.slowdown * 0.1 * 9 * bench.kv.block_size
    assert fetch.deadline == bench.clock.now + wait
    exchange.fetcher.receive("there", Granted(1, 9, 0.0))
    for chunk, computed, passed in ((0, True, 0.0), (1, False, 0.9 * wait), (2, False, 0.9 * wait)):
        bench.clock.now += passed
        exchange.fetcher.receive("there", Offer(1, chunk, chunk, chunk + 1, ((chunk + 1,),), computed=computed))
        began = bench.clock.now - passed if chunk else 0.0
    assert fetch.deadline == pytest.approx(began + wait * 8 / 9)


def test_the_measured_speed_of_a_source_reaches_the_load_and_the_limits() -> None:
    bench = make_bench()
    exchange, limits = bench.engine.exchange, bench.engine.exchange.fetcher.limits
    exchange.fetcher.connect("there", SOURCE)
    size, blocks = bench.kv.block_size, 8

    def begin(seed: int, *, seconds_per_token: float) -> float:
        """The fetch's time limit, 0 if there is none. Its blocks take 3 s each."""
        request = bench.request([seed, *range(1, size * blocks + 1)], source="there")
        if not exchange.begin(request, seconds_per_token=seconds_per_token):
            return 0.0
        message = next(m for _, m in exchange.take_outbound().to_sources if isinstance(m, FetchRequest))
        exchange.fetcher.receive("there", Granted(message.fetch, blocks, 0.0))
        theirs = (tuple(range(1, blocks + 1)),)
        exchange.fetcher.receive("there", Offer(message.fetch, 0, 0, blocks, theirs, computed=True))
        exchange.fetcher.receive("there", Commit(message.fetch, 0))
        exchange.handle_report(ChunkRead(0, message.fetch, 0, good=True, num_bytes=10**6, seconds=3.0 * blocks))
        return float(message.timeout)

    assert begin(1000, seconds_per_token=1e-3) == limits.min_seconds, "the speed is not known yet"
    assert bench.engine.load().source_speeds == [("there", 3.0, pytest.approx(1e6 / 24.0))]
    assert begin(1001, seconds_per_token=1.0) == limits.slowdown * 1.0 * blocks * size
    assert begin(1002, seconds_per_token=0.5) == 0, "computing it here is faster"
    bench.clock.now += limits.speed_seconds
    assert bench.engine.load().source_speeds == [], "it is measured again"


def test_short_chunks_say_little_about_the_speed_of_long_ones_and_the_slowest_rank_decides() -> None:
    fetcher = make_bench().engine.exchange.fetcher
    peers = fetcher.peers
    peers.connected("there", 7)
    peers.read("there", 0, (0.35, 500, 0), 0.0)
    for _ in range(3):
        peers.read("there", 0, (0.0214, 2, 0), 0.0)  # 20 ms of which are no matter of size
    assert peers.block_seconds("there", 0.0) < 0.002
    for _ in range(30):
        peers.read("there", 0, (0.7, 500, 0), 0.0)
    assert peers.block_seconds("there", 0.0) == pytest.approx(0.0014, rel=0.02), "it follows"
    peers.read("there", 1, (1.0, 100, 0), 0.0)
    assert peers.block_seconds("there", 0.0) == pytest.approx(0.01)
    assert peers.block_seconds("there", fetcher.limits.speed_seconds) == 0.0


def test_a_source_that_was_silent_is_avoided() -> None:
    """It may be stalled for long, still connected: each request would wait for the silence."""
    bench = make_bench()
    exchange, limits = bench.engine.exchange, bench.engine.exchange.fetcher.limits

    def begin(source: str) -> bool:
        return bool(exchange.begin(bench.request(list(range(1, 40)), source=source), seconds_per_token=1e-3))

    assert begin("there")
    bench.clock.now += patience(0.0) + 0.1
    exchange.tick()
    assert not begin("there") and begin("elsewhere")
    bench.clock.now += limits.avoid_silent
    assert begin("there")


@pytest.mark.parametrize(("per_token", "told", "step"), [(0.1, None, 1.6), (1e-3, 1.6, 1.6), (1e-3, 100.0, 100.0)])
def test_a_source_in_a_long_step_is_not_silent(per_token: float, told: float | None, step: float) -> None:
    """It answers between its steps: a step may take as long as it says, or as one would take here."""
    bench = make_bench(budget=16)
    exchange = bench.engine.exchange
    exchange.fetcher.connect("there", SOURCE)
    assert exchange.begin(bench.request(TOKENS, source="there"), seconds_per_token=per_token)
    if told is not None:
        exchange.fetcher.receive("there", Granted(1, 9, told))
    exchange.fetcher._fetches[1].deadline = 1e9
    began = bench.clock.now
    for over in (-0.1, 0.1):
        bench.clock.now = began + patience(step) + over
        exchange.tick()
        assert len(exchange.fetcher) == (over < 0)


def test_a_source_offers_what_is_cached_at_once_and_the_rest_with_the_step_that_computes_it() -> None:
    bench = make_bench()
    bench.run([bench.request(TOKENS)])
    exchange = bench.engine.exchange
    exchange.granter.connect("there", TARGET)
    for fetch, tokens in ((1, TOKENS), (2, list(range(200, 240)))):
        exchange.granter.receive("there", FetchRequest(fetch, b"", "", tokens, 0))
        offers = [each for _, each in exchange.take_outbound().to_targets if isinstance(each, Offer)]
        assert [offer.computed for offer in offers] == ([True] if fetch == 1 else [])
    orders: list[Order] = []
    sent: list[FromSource] = []
    exchange.send = lambda outbound: sent.extend(each for _, each in outbound.to_targets)

    def launched(plan: StepPlan) -> None:
        orders.extend(plan.orders)
        assert [each.computed for each in sent if isinstance(each, Offer)] == [False], "before the step computes it"

    bench.runner.on_launch = launched
    bench.engine.step()
    assert [order for order in orders if isinstance(order, Announce)] == [
        Announce(7, 1, 0, computed=True), Announce(7, 2, 0, computed=False)
    ]  # fmt: skip

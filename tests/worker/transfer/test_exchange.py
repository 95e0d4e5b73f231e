"""Both sides of an engine's exchange at once; the simulation covers everything else."""

from collections.abc import Callable
from typing import Any

import pytest

from headrace_worker.core.config import Rendezvous
from headrace_worker.core.transfer.messages import Done, Failed, FetchRequest, Granted, Refused
from headrace_worker.core.transfer.orders import ClosePair, Drop, OpenPair, Receive, Sent
from headrace_worker.core.transfer.send_speed import SendSpeed
from headrace_worker.server.transfer_convert import target_frame


def test_a_dropped_grants_blocks_are_released_before_a_fetch_may_write_them(make_bench: Callable[..., Any]) -> None:
    """They were free for a moment, and a fetch has reserved them: its Receive was ordered first, the Drop later."""
    exchange = make_bench().engine.exchange
    receive, drop = Receive(2, 1, 0, (1,), ((5,),)), Drop(1, 9)
    exchange.fetcher.orders.append(receive)
    exchange.granter.orders.append(drop)
    assert exchange.take_orders(0) == [drop, receive]


def test_blocks_of_a_grant_that_ends_too_early_are_dropped_first(make_bench: Callable[..., Any]) -> None:
    """A target that reports the end before it can have all blocks: chunks may be under way from them."""
    bench = make_bench(depth=1)
    granter = bench.engine.exchange.granter
    granter.open_pair("there", OpenPair(7, Rendezvous("there", 1, bytes(32)), 2, 0, 1, (), sends=True), 0.0)
    granter.receive("there", FetchRequest(1, b"", "", list(range(20, 60)), 0), 0.0)
    bench.engine.step()
    granter.receive("there", Done(1), 0.0)
    assert granter.orders == [Drop(7, 1)] and not len(granter)
    bench.step_until_idle({})
    assert bench.kv.pool.used == 0


def test_an_extreme_prediction_makes_no_fetch_endless(make_bench: Callable[..., Any]) -> None:
    """Its time limit is sent to the source in milliseconds, as 32 bits of a frame."""
    bench = make_bench()
    exchange = bench.engine.exchange
    assert exchange.begin(bench.request(list(range(1, 40)), source="there"), seconds_per_token=1e15)
    ((_, message),) = exchange.take_outbound().to_sources
    assert target_frame(message).request.timeout_ms == 1000 * exchange.fetcher.limits.max_seconds
    bench.clock.now += exchange.fetcher.limits.silence + 0.1
    exchange.tick()
    assert len(exchange.fetcher) == 0 and len(bench.scheduler.waiting) == 1


def test_the_measured_speed_of_a_pair_reaches_the_load_and_the_limits(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    exchange, limits = bench.engine.exchange, bench.engine.exchange.fetcher.limits
    size, blocks = bench.kv.block_size, 8
    tokens = list(range(1, size * blocks + 2))

    def begin(*, seconds_per_token: float, cached_only: bool = False) -> float:
        """The fetch's time limit, 0 if there is none."""
        request = bench.request(tokens, source="there")
        request.cached_only = cached_only
        if not exchange.begin(request, seconds_per_token=seconds_per_token):
            return 0.0
        ((_, message),) = exchange.take_outbound().to_sources
        exchange.receive_from_source("there", Granted(message.fetch, blocks, 3.0))
        exchange.receive_from_source("there", Failed(message.fetch, "enough"))
        return float(message.timeout)

    assert begin(seconds_per_token=1e-3) == limits.min_seconds, "the speed is not known yet"
    assert bench.engine.load().source_speeds == [("there", 3.0 / size)]
    assert begin(seconds_per_token=0.5) == limits.slowdown * 3.0 * blocks
    assert begin(seconds_per_token=0.1) == limits.slowdown * limits.slowest * 0.1 * blocks * size, "it may be wrong"
    assert begin(seconds_per_token=1e-3, cached_only=True) == 0, "computing it here is faster"
    assert begin(seconds_per_token=2.0, cached_only=True) == limits.slowdown * 2.0 * blocks * size
    bench.clock.now += limits.speed_seconds
    assert bench.engine.load().source_speeds == [], "it is measured again"
    assert begin(seconds_per_token=1e-3) == limits.min_seconds


def test_a_source_measures_the_slowest_rank_of_each_pair(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    exchange = bench.engine.exchange
    for pair, target in ((7, "there"), (8, "elsewhere")):
        exchange.open_target(target, OpenPair(pair, Rendezvous("there", 1, bytes(32)), 3, 0, 1, (), sends=True))
    for report in (Sent(0, 7, 4, 0.4), Sent(1, 7, 4, 0.8), Sent(1, 7, 2, 0.8), Sent(0, 8, 0, 0.5), Sent(0, 9, 1, 9.0)):
        exchange.handle_report(report)
    for target in ("there", "elsewhere"):
        exchange.receive_from_target(target, FetchRequest(1, b"", "", list(range(20, 60)), 0))
    granted = dict(exchange.take_outbound().to_targets)
    assert granted["there"].block_seconds == pytest.approx((0.8 * 0.8 + 0.8) / (0.8 * 4 + 2))
    assert granted["elsewhere"].block_seconds == 0, "of no blocks nothing is known"


def test_short_chunks_say_little_about_the_speed_of_long_ones() -> None:
    speed = SendSpeed()
    speed.add(0, 500, 0.35)
    for _ in range(3):
        speed.add(0, 2, 0.0214)  # 20 ms of which are no matter of size
    assert speed.block_seconds < 0.002
    for _ in range(30):
        speed.add(0, 500, 0.7)
    assert speed.block_seconds == pytest.approx(0.0014, rel=0.02), "it follows"


def test_a_source_that_was_silent_is_avoided(make_bench: Callable[..., Any]) -> None:
    """It may be stalled for long, still connected: each request would wait for the silence."""
    bench = make_bench()
    exchange, limits = bench.engine.exchange, bench.engine.exchange.fetcher.limits

    def begin(source: str) -> bool:
        return bool(exchange.begin(bench.request(list(range(1, 40)), source=source), seconds_per_token=1.0))

    assert begin("there")
    bench.clock.now += limits.silence + 0.1
    exchange.tick()
    assert not begin("there") and begin("elsewhere")
    bench.clock.now += limits.avoid_silent
    assert begin("there")


def test_sources_are_few_and_forgotten(make_bench: Callable[..., Any]) -> None:
    """A request names its source: a router can name any number of them."""
    bench = make_bench()
    exchange, limits = bench.engine.exchange, bench.engine.exchange.fetcher.limits

    def begin(source: str) -> bool:
        return bool(exchange.begin(bench.request(list(range(1, 40)), source=source), seconds_per_token=1.0))

    names = [f"there-{number}" for number in range(limits.sources + 1)]
    assert [begin(name) for name in names] == [True] * limits.sources + [False]
    assert begin(names[0])
    exchange.source_lost(names[1])
    assert not begin(names[1]) and not begin("another"), "it is avoided for a while"
    bench.clock.now += limits.avoid
    assert begin("another") and not begin(names[1])
    bench.clock.now += limits.silence + limits.avoid
    exchange.tick()
    assert not begin("one more"), "a connection that is not lost counts without a fetch, too"
    for name in [*names[2:], names[0], "another"]:
        exchange.source_lost(name)
    bench.clock.now += limits.avoid_silent
    again = [f"again-{number}" for number in range(limits.sources + 1)]
    assert [begin(name) for name in again] == [True] * limits.sources + [False], "the lost ones are forgotten"


class Sources:
    """A replica whose sources are connected at once, and answer each fetch at once that is not to run on."""

    def __init__(self, make_bench: Callable[..., Any]) -> None:
        self.bench = make_bench()
        self.exchange = self.bench.engine.exchange
        self.fetcher = self.exchange.fetcher
        self.limits = self.fetcher.limits
        self.connected: dict[str, int] = {}
        self.opened: list[float] = []  # times of connections
        self.closed: list[str] = []

    def fetch(self, source: str, *, runs: bool = False) -> bool:
        """Whether the prompt is fetched from it."""
        begun: bool = self.exchange.begin(self.bench.request(list(range(1, 40)), source=source), seconds_per_token=1.0)
        pairs = [order.pair for order in self.exchange.take_orders(0) if isinstance(order, ClosePair)]
        outbound = self.exchange.take_outbound()
        assert pairs == [self.connected.pop(name) for name in outbound.disconnect]
        self.closed += outbound.disconnect
        for name, message in outbound.to_sources:
            if name not in self.connected:
                self.connected[name] = pair = len(self.opened)
                self.opened.append(self.bench.clock.now)
                order = OpenPair(pair, Rendezvous("there", 1, bytes(32)), 2, 0, 1, (), sends=False)
                self.exchange.open_source(name, order)
                self.exchange.take_orders(0)
            if isinstance(message, FetchRequest) and not runs:
                self.exchange.receive_from_source(name, Refused(message.fetch, "it has no blocks"))
        assert len(self.connected) <= self.limits.sources
        return begun


@pytest.mark.parametrize("count", [100, 300])
def test_more_sources_in_turn_than_places_keep_connections_in_use(make_bench: Callable[..., Any], count: int) -> None:
    """A fetch each 50 ms. What is not fetched is computed here; connections are opened at a bounded rate."""
    sources = Sources(make_bench)
    limits, seconds = sources.limits, 60.0
    fetched = []
    for number in range(int(seconds / 0.05)):
        sources.bench.clock.now += 0.05
        fetched.append(sources.fetch(f"there-{number % count}"))
    later = fetched[count:]
    assert len(sources.opened) <= limits.sources + seconds / limits.replace + 1
    assert sum(later) / len(later) >= 0.75 * limits.sources / count
    if count == 100:
        assert sum(later) / len(later) > 0.6, "most prompts are fetched"


def test_names_without_end_do_not_close_connections_in_use(make_bench: Callable[..., Any]) -> None:
    """A router names another source each time: those that are used within `idle` keep their place, and of the others
    a few per second lose it; the one whose fetch runs keeps it, too."""
    sources = Sources(make_bench)
    limits = sources.limits
    names = [f"there-{number}" for number in range(limits.sources)]
    assert all(sources.fetch(name) for name in names)
    busy, running = names[:8], names[8]
    for number in range(200):
        if number % 20 == 0:
            assert all(sources.fetch(name) for name in busy)
            assert sources.fetch(running, runs=True)
        sources.bench.clock.now += 0.05
        sources.fetch(f"forged-{number}")
    assert not {*busy, running} & set(sources.closed)
    assert len(sources.closed) <= 200 * 0.05 / limits.replace


def test_a_source_whose_fetch_runs_keeps_its_place(make_bench: Callable[..., Any]) -> None:
    sources = Sources(make_bench)
    names = [f"there-{number}" for number in range(sources.limits.sources)]
    sources.fetch(names[0], runs=True)
    for name in names[1:]:
        sources.fetch(name)
    assert not sources.fetch("another")
    sources.bench.clock.now += sources.limits.idle
    assert sources.fetch("another") and sources.closed == [names[1]]
    assert not sources.fetch("one more"), "not two at once"
    assert len(sources.fetcher) == 1 and names[0] in sources.connected


def test_a_late_message_of_a_closed_source_opens_no_connection(make_bench: Callable[..., Any]) -> None:
    exchange = make_bench().engine.exchange
    exchange.receive_from_source("there", Granted(1, 2))
    assert not exchange.take_outbound()

"""Both sides of an engine's exchange at once; the simulation covers everything else."""

import pytest

from headrace_worker.core.config import Rendezvous
from headrace_worker.core.transfer.messages import Done, Failed, FetchRequest, Granted
from headrace_worker.core.transfer.orders import Drop, OpenPair, Receive, Sent
from headrace_worker.core.transfer.send_speed import SendSpeed
from support.worker.engine_bench import make_bench


def test_a_dropped_grants_blocks_are_released_before_a_fetch_may_write_them() -> None:
    """They were free for a moment, and a fetch has reserved them: its Receive was ordered first, the Drop later."""
    exchange = make_bench().engine.exchange
    receive, drop = Receive(2, 1, 0, (1,), ((5,),)), Drop(1, 9)
    exchange.fetcher.orders.append(receive)
    exchange.granter.orders.append(drop)
    assert exchange.take_orders(0) == [drop, receive]


def test_blocks_of_a_grant_that_ends_too_early_are_dropped_first() -> None:
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


def test_the_measured_speed_of_a_pair_reaches_the_load_and_the_limits() -> None:
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


def test_a_source_measures_the_slowest_rank_of_each_pair() -> None:
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


def test_a_source_that_was_silent_is_avoided() -> None:
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

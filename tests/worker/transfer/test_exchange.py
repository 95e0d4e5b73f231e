"""Both sides of an engine's exchange at once; the simulation covers everything else."""

from collections.abc import Callable
from typing import Any

from headrace_worker.core.config import Rendezvous
from headrace_worker.core.transfer.messages import Done, FetchRequest
from headrace_worker.core.transfer.orders import ClosePair, Drop, OpenPair, Receive
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
    bench.clock.now += limits.avoid
    assert begin("one more") and len(exchange.fetcher._peers) == 1


def test_a_source_that_is_not_used_loses_its_place(make_bench: Callable[..., Any]) -> None:
    bench = make_bench()
    fetcher = bench.engine.exchange.fetcher
    names = [f"there-{number}" for number in range(fetcher.limits.sources)]
    for number, name in enumerate(names):
        assert fetcher._peers.use(name, set(), number * 0.001)
        fetcher._peers.open(name, number)
    another = bench.request(list(range(1, 40)), source="another")
    bench.clock.now = fetcher.limits.idle / 2
    assert not bench.engine.exchange.begin(another, seconds_per_token=1.0) and not fetcher.close_peers
    bench.clock.now = 2 * fetcher.limits.idle
    assert not bench.engine.exchange.begin(another, seconds_per_token=1.0)
    assert fetcher.close_peers == [names[0]] and ClosePair(0) in fetcher.orders
    bench.clock.now += 2 * fetcher.limits.avoid
    assert bench.engine.exchange.begin(another, seconds_per_token=1.0)

"""Both sides of an engine's exchange at once; the simulation covers everything else."""

from collections.abc import Callable
from typing import Any

from headrace_worker.core.transfer.orders import Drop, Receive
from headrace_worker.server.transfer_convert import target_frame


def test_a_dropped_grants_blocks_are_released_before_a_fetch_may_write_them(make_bench: Callable[..., Any]) -> None:
    """They were free for a moment, and a fetch has reserved them: its Receive was ordered first, the Drop later."""
    exchange = make_bench().engine.exchange
    receive, drop = Receive(2, 1, 0, (1,), ((5,),)), Drop(1, 9)
    exchange.fetcher.orders.append(receive)
    exchange.granter.orders.append(drop)
    assert exchange.take_orders(0) == [drop, receive]


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

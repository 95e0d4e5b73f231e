"""Both sides of an engine's exchange at once; the simulation goes through everything else."""

from collections.abc import Callable
from typing import Any

from headrace_worker.transfer.orders import Drop, Receive


def test_blocks_of_a_dropped_grant_are_let_go_before_a_fetch_may_write_them(make_bench: Callable[..., Any]) -> None:
    """They were free for an instant, and a fetch has reserved them: its Receive was ordered first, the Drop later."""
    exchange = make_bench().engine.exchange
    receive, drop = Receive(2, 1, 0, (1,), ((5,),)), Drop(1, 9)
    exchange.fetcher.orders.append(receive)
    exchange.granter.orders.append(drop)
    assert exchange.take_orders(0) == [drop, receive]

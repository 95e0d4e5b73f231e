"""How couriers' reports reach the step loop of rank 0: directly, or as notes from the other ranks."""

from collections.abc import Callable

import msgspec

from headrace_worker.loop import EngineLoop
from headrace_worker.parallel.watch import Watch
from headrace_worker.transfer.orders import Report

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Report).decode


def to_loop(loop: EngineLoop) -> Callable[[Report], None]:
    """Of rank 0's courier."""
    return lambda report: loop.exchange(lambda exchange: exchange.reported(report))


def to_rank_0(watch: Watch) -> Callable[[Report], None]:
    """Of any other rank's courier."""
    return lambda report: watch.note(_encode(report).decode())


def listen(watch: Watch, loop: EngineLoop) -> None:
    """Has rank 0's loop hear what the other ranks' couriers say."""
    tell = to_loop(loop)
    watch.listen(lambda text: tell(_decode(text)))

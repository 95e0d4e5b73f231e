"""Passes reports of transfer workers to the step loop of rank 0: directly, or as notes from the other ranks."""

from collections.abc import Callable

import msgspec

from headrace_worker.assembly.loop import EngineLoop
from headrace_worker.comm.failure_detection import FailureDetector
from headrace_worker.core.transfer.orders import Report

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Report).decode


def to_loop(loop: EngineLoop) -> Callable[[Report], None]:
    """For rank 0's transfer worker."""
    return lambda report: loop.exchange(lambda exchange: exchange.handle_report(report))


def to_rank_0(detector: FailureDetector) -> Callable[[Report], None]:
    """For any other rank's transfer worker."""
    return lambda report: detector.notify_rank_0(_encode(report).decode())


def forward_notes(detector: FailureDetector, loop: EngineLoop) -> None:
    """Passes the reports of the other ranks to rank 0's loop."""
    handle = to_loop(loop)
    detector.on_notice(lambda text: handle(_decode(text)))

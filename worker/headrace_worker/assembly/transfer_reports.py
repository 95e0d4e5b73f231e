"""Passes reports of transfer workers to the step loop of rank 0: directly, or as notes from the other ranks."""

from collections.abc import Callable

import msgspec

from headrace_worker.assembly.command_queue import CommandQueue
from headrace_worker.comm.failure_detection import FailureDetector
from headrace_worker.core.transfer.orders import TransferReport

_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(TransferReport).decode


def to_commands(commands: CommandQueue) -> Callable[[TransferReport], None]:
    """For rank 0's transfer worker."""
    return lambda report: commands.exchange(lambda exchange: exchange.handle_report(report))


def to_rank_0(detector: FailureDetector) -> Callable[[TransferReport], None]:
    """For any other rank's transfer worker."""
    return lambda report: detector.notify_rank_0(_encode(report))


def forward_notes(detector: FailureDetector, commands: CommandQueue) -> None:
    """Passes the reports of the other ranks to the step loop of rank 0."""
    handle = to_commands(commands)
    detector.on_notice(lambda note: handle(_decode(note)))

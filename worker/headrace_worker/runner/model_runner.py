"""A `StepRunner` that owns rows and KV pools, so that it can be warmed up and recorded before it serves."""

from collections.abc import Callable
from typing import Protocol

from headrace_worker.core.layout import CacheLayout
from headrace_worker.core.step_runner import StepRunner
from headrace_worker.device.rank_device import GraphRecorder, RankDevice


class ModelRunner(StepRunner, Protocol):
    """The runner of one rank, or the one that represents all ranks.

    What only passes steps on (a thread, a profiler) or simulates them has neither rows nor a device, and is only a
    `StepRunner`: the engine needs no more.
    """

    layout: CacheLayout
    num_blocks: int
    max_rows: int
    max_len: int
    device: RankDevice

    def clear(self, blocks: int, rows: int = 1) -> None:
        """Reset the first blocks and rows, so that a warm-up has no effect."""
        ...

    def record(self, recorder: GraphRecorder, done: Callable[[float], None]) -> tuple[list[int], list[int]]:
        """Record steps for replay; returns the sizes: decode steps, and mixed ones.

        Raises what the recorder or the model raises when it cannot be recorded; steps then run as before.
        """
        ...

"""Warm-up before the replica is ready: on a GPU kernels are compiled; then steps are timed.

Steps of one prompt, of one row and of several rows: routers predict from them what a further request costs before any
was served. Without the last, steps of all batch sizes would seem to take equally long, and the first burst would go to
the replica whose steps happened to be the fastest.
"""

import time
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

from headrace_worker.core.plan import RowInit, RowSampling, StepPlan, TableUpdate, Work
from headrace_worker.core.progress import Progress, ignore_progress
from headrace_worker.runner.coverage import cover
from headrace_worker.runner.model_runner import ModelRunner

STEP_LIMIT = 0.5  # seconds: heartbeats and cancels are handled between steps
_MARGIN = 0.8  # share of the limit: the machine may slow down, and long contexts cost more
_PROBE_TOKENS = 128
GPU_BUDGET = 8192
_SMALLEST, _LARGEST = 32, 4096
_ROWS = 16  # that decode together


class TimedStep(NamedTuple):
    """What a step computed, and how long it took."""

    prefill_tokens: int
    decode_sequences: int
    kv_tokens: int
    seconds: float


class StepTimes(NamedTuple):
    """The times of one row that decodes, of a prompt, and of several rows that decode."""

    decode: TimedStep
    prefill: TimedStep
    together: TimedStep


@dataclass(frozen=True, slots=True)
class WarmupResult:
    """Measured step times and the token budget that follows from them."""

    max_num_batched_tokens: int
    steps: StepTimes


def warm_up(runner: ModelRunner, report: Progress = ignore_progress, budget: int | None = None) -> WarmupResult:
    """Time steps and choose the token budget: on a CPU a step stays below `STEP_LIMIT`.

    On a GPU steps of every kind, of up to `budget` tokens, run before. Resets rows and pools.
    """
    if runner.device.asynchronous:
        cover(runner, budget or GPU_BUDGET, lambda done: report("compiling kernels", done))
    report("warming up", 0.0)
    steps = time_steps(runner)
    report("warming up", 1.0)
    if budget is None and runner.device.asynchronous:
        budget = GPU_BUDGET
    elif budget is None:
        fixed = steps.decode.seconds
        per_token = max(steps.prefill.seconds - fixed, 1e-6) / steps.prefill.prefill_tokens
        block_size = runner.layout.block_size
        fitting_tokens = int((_MARGIN * STEP_LIMIT - fixed) / per_token)
        budget = max(_SMALLEST, min(_LARGEST, fitting_tokens // block_size * block_size))
    return WarmupResult(budget, steps)


def time_steps(runner: ModelRunner) -> StepTimes:
    """Resets rows and pools."""
    block_size = runner.layout.block_size
    groups = len(runner.layout.groups)
    fitting = (runner.num_blocks - 1) // groups * block_size
    tokens = max(1, min(_PROBE_TOKENS, fitting - 4, runner.max_len - 4))
    entries = -(-(tokens + 4) // block_size)
    rows = range(min(_ROWS, runner.max_rows))
    inits = [RowInit(row, 0, [0] * (tokens + 1), tokens, RowSampling(temperature=0.0)) for row in rows]
    # All rows read and write the same blocks: what they compute is discarded.
    tables = [TableUpdate(group, row, 0, _blocks(group, entries)) for row in rows for group in range(groups)]
    runner.launch(StepPlan(0, [], inits, tables, []))
    numbers = count(1)

    def fastest(work: list[Work], times: int = 2) -> float:
        """The seconds of the fastest of several runs: the first run includes lazy initialisation."""
        seconds = []
        for _ in range(times):
            started = time.perf_counter()
            runner.collect(runner.launch(StepPlan(next(numbers), [], [], [], work)))
            seconds.append(time.perf_counter() - started)
        return min(seconds)

    prefill = fastest([Work(0, 0, tokens, True)])
    decode = fastest([Work(0, tokens, 1, True)], 3)
    together = fastest([Work(row, tokens, 1, True) for row in rows])
    runner.launch(StepPlan(next(numbers), list(rows), [], [], []))
    runner.clear(1 + groups * entries, len(rows))
    return StepTimes(
        decode=TimedStep(0, 1, tokens + 1, decode),
        prefill=TimedStep(tokens, 0, tokens, prefill),
        together=TimedStep(0, len(rows), len(rows) * (tokens + 1), together),
    )


def _blocks(group: int, entries: int) -> list[int]:
    first = 1 + group * entries
    return list(range(first, first + entries))

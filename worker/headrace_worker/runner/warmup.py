"""Warm-up before the replica is ready: on a GPU kernels are compiled; then prefill and decode steps are timed."""

import time
from dataclasses import dataclass

from headrace_worker.core.plan import RowInit, RowSampling, StepPlan, TableUpdate, Work
from headrace_worker.core.progress import Progress, ignore_progress
from headrace_worker.runner.coverage import cover
from headrace_worker.runner.model_runner import ModelRunner

STEP_LIMIT = 0.5  # seconds: heartbeats and cancels are handled between steps
_MARGIN = 0.8  # of the limit: the machine may slow down, and long contexts cost more
_PROBE_TOKENS = 128
GPU_BUDGET = 8192
_SMALLEST, _LARGEST = 32, 4096


@dataclass(frozen=True, slots=True)
class WarmupResult:
    """Measured step times and the token budget that follows from them."""

    max_num_batched_tokens: int
    steps: tuple[tuple[int, int, int, float], ...] = ()  # prefill tokens, decoding rows, KV tokens, seconds


def warm_up(runner: ModelRunner, report: Progress = ignore_progress, budget: int | None = None) -> WarmupResult:
    """Run prefill and decode steps on row 0 and choose the token budget: on a CPU a step stays below `STEP_LIMIT`.

    On a GPU steps of every kind, of up to `budget` tokens, run before. Resets rows and pools.
    """
    if runner.device.asynchronous:
        cover(runner, budget or GPU_BUDGET, lambda done: report("compiling kernels", done))
    block_size = runner.layout.block_size
    groups = len(runner.layout.groups)
    fitting = (runner.num_blocks - 1) // groups * block_size
    tokens = max(1, min(_PROBE_TOKENS, fitting - 4, runner.max_len - 4))
    entries = -(-(tokens + 4) // block_size)
    tables = [TableUpdate(group, 0, 0, _blocks(group, entries)) for group in range(groups)]
    init = RowInit(0, 0, [0] * tokens, tokens, RowSampling(temperature=0.0))
    report("warming up", 0.0)
    prefill = []
    for attempt in range(2):  # the first run includes lazy initialisation
        prefill.append(_timed(runner, StepPlan(attempt, [], [init], tables, [Work(0, 0, tokens, True)])))
        report("warming up", 0.3 * (attempt + 1))
    decode = [_timed(runner, StepPlan(2 + n, [], [], [], [Work(0, tokens + n, 1, True)])) for n in range(3)]
    runner.launch(StepPlan(5, [0], [], [], []))
    runner.clear(1 + groups * entries)
    report("warming up", 1.0)
    fixed = min(decode)
    per_token = max(prefill[-1] - fixed, 1e-6) / tokens
    if budget is None and runner.device.asynchronous:
        budget = GPU_BUDGET
    elif budget is None:
        fitting_tokens = int((_MARGIN * STEP_LIMIT - fixed) / per_token)
        budget = max(_SMALLEST, min(_LARGEST, fitting_tokens // block_size * block_size))
    steps = [(0, 1, tokens + 1 + n, seconds) for n, seconds in enumerate(decode)]
    steps.append((tokens, 0, tokens, prefill[-1]))
    return WarmupResult(budget, tuple(steps))


def _blocks(group: int, entries: int) -> list[int]:
    first = 1 + group * entries
    return list(range(first, first + entries))


def _timed(runner: ModelRunner, plan: StepPlan) -> float:
    started = time.perf_counter()
    runner.collect(runner.launch(plan))
    return time.perf_counter() - started

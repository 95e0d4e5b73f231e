"""Steps of every shape and with every option that can occur in serving, so that nothing is compiled afterwards.

A GPU's kernels are compiled for constants that follow from the shape of a step: few or many tokens, short or long
sequences, one or several, and the sampling options of the rows. The contents do not matter: all positions of all rows
are in one block per cache group, which is reset afterwards.
"""

from collections.abc import Callable, Iterator
from typing import get_type_hints

import numpy as np

from headrace_worker.core.layout import CacheLayout
from headrace_worker.core.plan import RowInit, RowSampling, StepPlan, TableUpdate, Work
from headrace_worker.core.scheduled_step import SCORED_POSITIONS
from headrace_worker.runner.model_runner import ModelRunner


def _each_option() -> Iterator[RowSampling]:
    """Each option with its examples, alone."""
    for name, declared in get_type_hints(RowSampling, include_extras=True).items():
        for meta in getattr(declared, "__metadata__", ()):
            yield from (RowSampling(temperature=1.0, **{name: value}) for value in meta.examples)


OPTIONS = (
    RowSampling(temperature=0.0),
    RowSampling(temperature=1.0),
    *_each_option(),
    RowSampling(temperature=0.0, repetition_penalty=1.1, logprobs=0),
    RowSampling(temperature=0.0, logit_bias=((0, 1.0),)),
    RowSampling(temperature=0.0, min_tokens=1 << 30, stop_token_ids=(0,)),
    RowSampling(temperature=1.0, top_p=0.9, logprobs=5),
)
LARGEST_OPTIONS = RowSampling(
    temperature=1.0,
    top_p=0.9,
    top_k=20,
    min_p=0.1,
    repetition_penalty=1.1,
    presence_penalty=0.1,
    logprobs=20,
    prompt_logprobs=20,
)
"""What takes the most memory if all rows have it: defaults of a model apply to every request."""
SCORED = RowSampling(temperature=0.0, prompt_logprobs=1)
_FEW = (2, 8, 32, 64)  # tokens of a small prompt


def cover(runner: ModelRunner, budget: int, done: Callable[[float], None] = lambda fraction: None) -> None:
    """Run all of these steps, of up to `budget` tokens each; resets rows and pools."""
    plans = list(covering_plans(runner.layout, runner.max_rows, runner.max_len, budget))
    for place, plan in enumerate(plans):
        handle = runner.launch(plan)
        if plan.guided:
            runner.draw(handle, {0: np.full(1, -1, np.int32)})
        runner.collect(handle)
        done((place + 1) / len(plans))
    runner.clear(1 + len(runner.layout.groups), _rows(runner.max_rows, runner.max_len, budget))


def largest_steps(layout: CacheLayout, max_rows: int, max_len: int, budget: int) -> Iterator[StepPlan]:
    """The steps that take the most memory: all tokens, and all rows, each of which filters, penalizes and reports.

    Rows are as long as they can be in the last one: what decoding and penalties take grows with the length.
    """
    rows = min(max_rows, budget)
    each = max(1, min(max_len - 2, budget // rows))
    started = [_start(layout, row, each, max_len, LARGEST_OPTIONS) for row in range(rows)]
    scored = [max(0, min(each - 1, SCORED_POSITIONS - row * (each - 1))) for row in range(rows)]
    yield _step([Work(row, 0, each, True, scored[row]) for row in range(rows)], started)
    yield _step([Work(row, each, 1, True) for row in range(rows)], [])
    long = min(budget, max_len - 2)
    yield _step([Work(0, 0, long, True)], [_start(layout, 0, long, max_len, LARGEST_OPTIONS)])
    # Nothing reads which tokens are known: they are zeros, all of the prompt, so that none is counted as an output.
    longest = [(RowInit(row, 0, [], max_len, LARGEST_OPTIONS), _tables(layout, row, max_len)) for row in range(rows)]
    yield _step([Work(row, max_len - 1, 1, True) for row in range(rows)], longest)
    yield StepPlan(0, list(range(rows)), [], [], [])


def prompt_step(layout: CacheLayout, tokens: int, max_len: int) -> StepPlan:
    """A step of so many tokens of prompts, in as few rows as possible."""
    most = max_len - 2
    counts = [min(most, tokens - first) for first in range(0, tokens, most)]
    started = [_start(layout, row, count, max_len, OPTIONS[0]) for row, count in enumerate(counts)]
    return _step([Work(row, 0, count, True) for row, count in enumerate(counts)], started)


def covering_plans(layout: CacheLayout, max_rows: int, max_len: int, budget: int) -> Iterator[StepPlan]:
    """The steps, the last of which frees all rows."""
    rows = _rows(max_rows, max_len, budget)
    each = max(1, min(max_len - 2, budget // rows))

    def start(row: int, tokens: int, sampling: RowSampling) -> tuple[RowInit, list[TableUpdate]]:
        return _start(layout, row, tokens, max_len, sampling)

    # Many tokens, then all rows decode: all options in one batch.
    all_rows = [start(row, each, OPTIONS[row % len(OPTIONS)]) for row in range(rows)]
    yield _step([Work(row, 0, each, True) for row in range(rows)], all_rows)
    yield _step([Work(row, each, 1, True) for row in range(rows)], [])
    # Each option alone, and under a mask.
    for options in OPTIONS:
        yield _step([Work(0, 0, 1, True)], [start(0, 1, options)])
    yield _step([Work(0, 0, 1, True)], [start(0, 1, OPTIONS[0])], guided=True)
    # Few tokens: alone, in a chunk that samples nothing, beside a request that decodes.
    for few in _FEW:
        if few < min(max_len, budget):
            yield _step([Work(0, 0, few, True)], [start(0, few, OPTIONS[0])])
            yield _step([Work(0, 0, few, False)], [start(0, few + 1, OPTIONS[0])])
            yield _step([Work(0, 0, few, False, few)], [start(0, few + 1, SCORED)])
            if rows > 1:
                decoding = start(1, max_len - 1, OPTIONS[0])
                chunk = start(0, few, OPTIONS[0])
                yield _step([Work(1, max_len - 2, 1, True), Work(0, 0, few, True)], [decoding, chunk])
    # The longest sequence.
    yield _step([Work(0, max_len - 1, 1, True)], [start(0, max_len, OPTIONS[0])])
    yield StepPlan(0, list(range(rows)), [], [], [])


def _start(
    layout: CacheLayout, row: int, tokens: int, max_len: int, sampling: RowSampling
) -> tuple[RowInit, list[TableUpdate]]:
    return RowInit(row, 0, [0] * tokens, tokens, sampling), _tables(layout, row, max_len)


def _tables(layout: CacheLayout, row: int, max_len: int) -> list[TableUpdate]:
    """One block per cache group serves all positions."""
    entries = -(-max_len // layout.block_size)
    return [TableUpdate(group, row, 0, [1 + group] * entries) for group in range(len(layout.groups))]


def _step(work: list[Work], started: list[tuple[RowInit, list[TableUpdate]]], guided: bool = False) -> StepPlan:
    inits = [init for init, _ in started]
    tables = [update for _, updates in started for update in updates]
    return StepPlan(0, [], inits, tables, work, guided=guided, scores=any(item.scored for item in work))


def _rows(max_rows: int, max_len: int, budget: int) -> int:
    """As many as there are options, or as a step of the largest size needs."""
    return min(max_rows, budget, max(len(OPTIONS), -(-budget // max(1, max_len - 2))))

"""Fixtures of the engine's tests: a fake runner whose tokens depend only on a row's own tokens."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import numpy as np
import pytest

from headrace_proto.block_hash import BlockHasher, derive_key
from headrace_worker.core.engine import Engine
from headrace_worker.core.guide import Mask, TokenGuide
from headrace_worker.core.kv.manager import KVManager, ModelScope
from headrace_worker.core.layout import CacheGroupSpec, CacheLayout
from headrace_worker.core.plan import RowSampling, StepPlan, StepResult
from headrace_worker.core.request import Request
from headrace_worker.core.scheduler import Scheduler, SchedulerLimits

sys.path.insert(0, str(Path(__file__).parent))  # helpers of this folder, whatever the import mode


def next_token(tokens: list[int]) -> int:
    """The token that the fake model samples after `tokens`: a cheap, non-constant function of all of them."""
    value = len(tokens)
    for token in tokens:
        value = (value * 31 + token) % 50021
    return value % 1000 + 10


def guided_token(tokens: list[int], mask: Mask | None) -> int:
    """As `next_token`, or the next one that the mask allows."""
    token = next_token(tokens)
    if mask is None:
        return token
    allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
    return int(allowed[np.searchsorted(allowed, token) % len(allowed)])


def expected(prompt: list[int], count: int) -> list[int]:
    """The undisturbed outputs of the fake model."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return tokens[len(prompt) :]


def expected_of(prompt: list[int], count: int, guide: TokenGuide, stop_ids: frozenset[int] = frozenset()) -> list[int]:
    """The same for a guided request, until it ends."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count and not guide.finished and not stop_ids & set(tokens[len(prompt) :]):
        tokens.append(guided_token(tokens, guide.mask()))
        if tokens[-1] not in stop_ids:
            guide.advance(tokens[-1])
    return tokens[len(prompt) :]


@dataclass
class FakeStep:
    """A launched step of the fake runner."""

    plan: StepPlan
    result: StepResult | None = None


@dataclass
class FakeRunner:
    """Checks every plan against a copy of rows, tables and written KV slots, and fails on any violation.

    A slot stores a hash of the whole prefix that it was computed from, so that reading a block that was reused, never
    written, or written after another prefix is detected.
    """

    layout: CacheLayout
    on_launch: Callable[[StepPlan], None] = lambda plan: None
    on_draw: Callable[[StepPlan], None] = lambda plan: None
    on_collect: Callable[[StepPlan], None] = lambda plan: None
    rows: dict[int, list[int]] = field(default_factory=dict)
    tables: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    slots: dict[tuple[int, int, int], int] = field(default_factory=dict)
    steps: int = 0
    undrawn: FakeStep | None = None

    def launch(self, plan: StepPlan) -> FakeStep:
        self.on_launch(plan)
        assert self.undrawn is None, "a step was launched before the previous one was sampled"
        self.steps += 1
        for row in plan.frees:
            self.rows.pop(row, None)
        for init in plan.inits:
            self.rows[init.row] = list(init.token_ids)
            for group in range(len(self.layout.groups)):
                self.tables[group, init.row] = {}
        for update in plan.tables:
            for offset, block in enumerate(update.block_ids):
                self.tables[update.group, update.row][update.first + offset] = block
        assert len({work.row for work in plan.work}) == len(plan.work)
        for work in plan.work:
            self._write(work.row, work.start, work.count)
        step = FakeStep(plan)
        if plan.guided:
            self.undrawn = step
        else:
            self._finish(step, {})
        return step

    def draw(self, handle: FakeStep, masks: Mapping[int, Mask]) -> None:
        assert handle is self.undrawn
        self.undrawn = None
        self.on_draw(handle.plan)
        self._finish(handle, masks)

    def collect(self, handle: FakeStep) -> StepResult:
        assert handle.result is not None, "a step was collected before it was sampled"
        self.on_collect(handle.plan)
        return handle.result

    def _finish(self, step: FakeStep, masks: Mapping[int, Mask]) -> None:
        drawing = [work for work in step.plan.work if work.sample]
        tokens = [self._draw(work.row, work.start + work.count, masks.get(i)) for i, work in enumerate(drawing)]
        step.result = StepResult(step.plan.step, tokens, {}, {})

    def _write(self, row: int, start: int, count: int) -> None:
        size = self.layout.block_size
        tokens = self.rows[row]
        assert start + count <= len(tokens), "a plan computes positions whose tokens do not exist"
        for group in self.layout.groups:
            table = self.tables[group.index, row]
            for position in range(start, start + count):
                block = table[position // size]
                assert block != 0, "a plan writes into the null block"
                self.slots[group.index, block, position % size] = hash(tuple(tokens[: position + 1]))

    def _draw(self, row: int, position: int, mask: Mask | None) -> int:
        size = self.layout.block_size
        tokens = self.rows[row]
        assert position == len(tokens), "a token is sampled before its predecessors are computed"
        for group in self.layout.groups:
            table = self.tables[group.index, row]
            first = max(0, position - group.window) if group.window else 0
            for seen in range(first, position):
                slot = (group.index, table[seen // size], seen % size)
                assert self.slots.get(slot) == hash(tuple(tokens[: seen + 1])), (
                    "attention would read the KV of another prefix"
                )
        token = guided_token(tokens, mask)
        tokens.append(token)
        return token


@dataclass
class PipelineRunner(FakeRunner):
    """Several stages: the first one knows a token only when its step was collected, not when it was launched."""

    batches: int = 2
    in_flight: list[StepPlan] = field(default_factory=list)
    most_in_flight: int = 0
    generations: dict[int, int] = field(default_factory=dict)
    _late: list[tuple[int, int, int]] = field(default_factory=list)  # row, generation, token

    def launch(self, plan: StepPlan) -> FakeStep:
        self.on_launch(plan)
        for row in plan.frees:
            self.generations.pop(row, None)
        for init in plan.inits:
            self.generations[init.row] = init.generation
        pending = {(row, generation) for row, generation, _ in self._late}
        for work in plan.work:
            assert (work.row, self.generations[work.row]) not in pending, "a row's next position needs its token"
        launch, self.on_launch = self.on_launch, lambda plan: None
        step = super().launch(plan)
        self.on_launch = launch
        self.in_flight.append(plan)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))
        assert len(self.in_flight) <= self.batches
        return step

    def collect(self, handle: FakeStep) -> StepResult:
        collected, self.on_collect = self.on_collect, lambda plan: None
        result = super().collect(handle)
        self.on_collect = collected
        plan = self.in_flight.pop(0)
        assert plan is handle.plan, "steps are collected in order"
        drawn, self._late = self._late[: len(result.tokens)], self._late[len(result.tokens) :]
        for row, generation, token in drawn:
            if self.generations.get(row) == generation:
                self.rows[row].append(token)
        self.on_collect(plan)
        return result

    def _finish(self, step: FakeStep, masks: Mapping[int, Mask]) -> None:
        super()._finish(step, masks)
        assert step.result is not None
        rows = [work.row for work in step.plan.work if work.sample]
        for row, token in zip(rows, step.result.tokens, strict=True):
            self._late.append((row, self.generations[row], self.rows[row].pop()))
            assert self._late[-1][2] == token


class Clock:
    """A clock that is advanced by the test."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Bench:
    """An engine with the fake runner, and access to its parts."""

    engine: Engine
    runner: FakeRunner
    scheduler: Scheduler
    kv: KVManager
    clock: Clock
    random: Random = field(default_factory=lambda: Random(0))

    def request(
        self,
        prompt: list[int],
        max_tokens: int = 8,
        salt: bytes = b"",
        stop_ids: frozenset[int] = frozenset(),
        **options: object,
    ) -> Request:
        """A request with a new id."""
        fields: dict[str, object] = {
            "attempt_id": self.random.randbytes(16),
            "tokens": list(prompt),
            "prompt_len": len(prompt),
            "max_len": len(prompt) + max_tokens,
            "sampling": RowSampling(temperature=0.0),
            "stop_ids": stop_ids,
            "chain": self.kv.start_chain(salt, ""),
            "arrival": self.clock(),
        }
        return Request(**fields | options)  # type: ignore[arg-type]

    def run(self, requests: list[Request], steps: int = 10_000) -> dict[bytes, list[int]]:
        """Submits all and steps until idle, checking integrity at every step. Returns the emitted tokens."""
        emitted: dict[bytes, list[int]] = {request.attempt_id: [] for request in requests}
        for request in requests:
            assert self.engine.submit(request) is None
        self.step_until_idle(emitted, steps)
        return emitted

    def step_until_idle(self, emitted: dict[bytes, list[int]], steps: int = 10_000) -> None:
        for _ in range(steps):
            if not self.engine.has_work:
                return
            for output in self.engine.step():
                tokens = emitted.setdefault(output.attempt_id, [])
                assert output.first_index == len(tokens) or not output.token_ids
                tokens.extend(output.token_ids)
            self.scheduler.check()
            self.clock.now += 0.01
        raise AssertionError("the engine does not become idle")


def make_layout(windows: tuple[int, ...] = (0,), block_size: int = 4) -> CacheLayout:
    groups = tuple(CacheGroupSpec(i, (i,), 1, 8, window) for i, window in enumerate(windows))
    return CacheLayout(block_size, groups, 4)


@pytest.fixture
def make_bench() -> Callable[..., Bench]:
    """Creates a bench: windows per cache group, blocks, limits, depth of the loop; `batches` > 1: as many in flight."""

    def make(
        windows: tuple[int, ...] = (0,),
        num_blocks: int = 128,
        max_num_seqs: int = 8,
        budget: int = 32,
        block_size: int = 4,
        depth: int = 0,
        max_waiting: int = 1000,
        batches: int = 1,
    ) -> Bench:
        layout = make_layout(windows, block_size)
        clock = Clock()
        kv = KVManager(layout, num_blocks, BlockHasher(derive_key(b"k")), ModelScope("m", "r", "float32", "float32"))
        scheduler = Scheduler(SchedulerLimits(max_num_seqs, budget, max_waiting, batches=batches), kv, clock)
        runner = FakeRunner(layout) if batches == 1 else PipelineRunner(layout, batches=batches)
        return Bench(
            Engine(scheduler, runner, clock, depth if batches == 1 else batches - 1), runner, scheduler, kv, clock
        )

    return make


@pytest.fixture
def undisturbed() -> Callable[[list[int], int], list[int]]:
    """The fake model's outputs for a prompt."""
    return expected


@pytest.fixture
def undisturbed_of() -> Callable[..., list[int]]:
    """The fake model's outputs for a prompt and a new guide."""
    return expected_of

"""Runners without tensors, which check every plan."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headrace_worker.core.guide import Mask
from headrace_worker.core.layout import CacheLayout
from headrace_worker.core.plan import StepPlan, StepResult
from support.worker.fake_model import guided_token


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
    states: dict[int, int] = field(default_factory=lambda: {0: hash(())})  # of slots: the prefix that led to them
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
        if self.layout.states:
            self._advance_states(plan)
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

    def _advance_states(self, plan: StepPlan) -> None:
        """Sequences are computed side by side: no one writes what another one reads."""
        first = [self.states.get(work.state_read) for work in plan.work]
        written = [slot for work in plan.work for _, slot in work.state_writes]
        assert len(set(written)) == len(written) and 0 not in written, "two pieces write one slot"
        for work, content in zip(plan.work, first, strict=True):
            tokens = self.rows[work.row]
            assert content == hash(tuple(tokens[: work.start])), "a layer would read the state of another prefix"
            assert [end for end, _ in work.state_writes] == sorted({end for end, _ in work.state_writes})
            assert work.state_writes[-1][0] == work.start + work.count
            others = {slot for other in plan.work if other is not work for _, slot in other.state_writes}
            assert work.state_read not in others, "a slot is overwritten while it is read"
            for end, slot in work.state_writes:
                self.states[slot] = hash(tuple(tokens[:end]))

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
    uses: dict[int, int] = field(default_factory=dict)
    _late: list[tuple[int, int, int]] = field(default_factory=list)  # row, row_use, token

    def launch(self, plan: StepPlan) -> FakeStep:
        self.on_launch(plan)
        for row in plan.frees:
            self.uses.pop(row, None)
        for init in plan.inits:
            self.uses[init.row] = init.row_use
        pending = {(row, row_use) for row, row_use, _ in self._late}
        for work in plan.work:
            assert (work.row, self.uses[work.row]) not in pending, "a row's next position needs its token"
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
        for row, row_use, token in drawn:
            if self.uses.get(row) == row_use:
                self.rows[row].append(token)
        self.on_collect(plan)
        return result

    def _finish(self, step: FakeStep, masks: Mapping[int, Mask]) -> None:
        super()._finish(step, masks)
        assert step.result is not None
        rows = [work.row for work in step.plan.work if work.sample]
        for row, token in zip(rows, step.result.tokens, strict=True):
            self._late.append((row, self.uses[row], self.rows[row].pop()))
            assert self._late[-1][2] == token

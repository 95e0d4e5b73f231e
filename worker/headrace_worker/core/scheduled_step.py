"""A step while it is planned, and a planned step."""

from dataclasses import dataclass, field

from headrace_worker.core.kv.manager import BlockTable
from headrace_worker.core.kv.states import StateSlots
from headrace_worker.core.plan import RowInit, StepPlan, TableUpdate, Work
from headrace_worker.core.request import Request

SCORED_POSITIONS = 256  # scored prompt positions in one step: each takes as much memory as a sampled row


@dataclass(slots=True)
class ScheduledStep:
    """A plan and the requests of its work items."""

    plan: StepPlan
    requests: list[Request]  # per work item
    # Per work item: the table that the plan writes to; a request that was preempted since has another one.
    block_tables: list[BlockTable]
    prefill_tokens: int = 0
    decode_sequences: int = 0
    kv_tokens: int = 0
    guided: list[tuple[int, Request]] = field(default_factory=list)  # constrained rows: index into the sampled tokens


@dataclass(slots=True)
class StepDraft:
    """A plan under construction."""

    budget: int
    frees: list[int]
    states: StateSlots | None = None
    inits: list[RowInit] = field(default_factory=list)
    tables: list[TableUpdate] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    block_tables: list[BlockTable] = field(default_factory=list)
    prefill_tokens: int = 0
    decode_sequences: int = 0
    kv_tokens: int = 0
    preempted: bool = False
    scorable: int = SCORED_POSITIONS  # positions of prompts that may still get log-probabilities in this step

    def room(self, request: Request) -> int:
        """Positions of the request that this step may still compute."""
        return min(self.budget, self.scorable) if request.scores else self.budget

    def add(self, request: Request, table: BlockTable, count: int) -> None:
        start = request.computed
        end = start + count
        sample = count == request.missing and not request.prefill_only
        scored = max(0, min(end, request.prompt_len - 1) - start) if request.scores else 0
        self.scorable -= scored
        self.work.append(Work(request.row, start, count, sample, scored))
        self.requests.append(request)
        self.block_tables.append(table)
        self.budget -= count
        self.kv_tokens += end
        if count > 1:
            self.prefill_tokens += count
        else:
            self.decode_sequences += 1
        request.computed = end
        if sample:
            request.in_flight += 1

    def add_last(self, request: Request, table: BlockTable) -> None:
        """As `add`, for a request that misses one position, which is the most common case."""
        start = request.computed
        self.work.append(Work(request.row, start, 1, True))
        self.requests.append(request)
        self.block_tables.append(table)
        self.budget -= 1
        self.kv_tokens += start + 1
        self.decode_sequences += 1
        request.computed = start + 1
        request.in_flight += 1

    def finish(self, step: int, may_be_guided: bool) -> ScheduledStep:
        """The finished step. Without `may_be_guided` requests are not searched for guides."""
        if self.states is not None:  # at last: requests that came later may have asked for snapshots
            self.work = self.states.plan(self.work, [table.state for table in self.block_tables])
        guided = self._guided() if may_be_guided else []
        scores = self.scorable < SCORED_POSITIONS
        plan = StepPlan(step, self.frees, self.inits, self.tables, self.work, guided=bool(guided), scores=scores)
        return ScheduledStep(
            plan, self.requests, self.block_tables, self.prefill_tokens, self.decode_sequences, self.kv_tokens, guided
        )

    def _guided(self) -> list[tuple[int, Request]]:
        drawing = [request for work, request in zip(self.work, self.requests, strict=True) if work.sample]
        return [(index, request) for index, request in enumerate(drawing) if request.guide is not None]

"""A step in the making, and a step as it was planned."""

from dataclasses import dataclass, field

from headrace_worker.kv.manager import BlockTable
from headrace_worker.plan import RowInit, StepPlan, TableUpdate, Work
from headrace_worker.request import Request


@dataclass(slots=True)
class ScheduledStep:
    """A plan and whom its work items belong to."""

    plan: StepPlan
    requests: list[Request]  # per work item
    holdings: list[BlockTable]  # per work item: the table the plan writes to, to tell a later one of the same request
    prefill_tokens: int = 0
    decode_sequences: int = 0
    kv_tokens: int = 0


@dataclass(slots=True)
class StepDraft:
    """A plan in the making."""

    budget: int
    frees: list[int]
    inits: list[RowInit] = field(default_factory=list)
    tables: list[TableUpdate] = field(default_factory=list)
    work: list[Work] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    holdings: list[BlockTable] = field(default_factory=list)
    prefill_tokens: int = 0
    decode_sequences: int = 0
    kv_tokens: int = 0
    preempted: bool = False

    def add(self, request: Request, table: BlockTable, count: int) -> None:
        start = request.computed
        end = start + count
        sample = count == request.missing and not request.prefill_only
        self.work.append(Work(request.row, start, count, sample))
        self.requests.append(request)
        self.holdings.append(table)
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
        """As `add`, for a request that misses one position: what most of them do in most steps."""
        start = request.computed
        self.work.append(Work(request.row, start, 1, True))
        self.requests.append(request)
        self.holdings.append(table)
        self.budget -= 1
        self.kv_tokens += start + 1
        self.decode_sequences += 1
        request.computed = start + 1
        request.in_flight += 1

    def finish(self, step: int) -> ScheduledStep:
        """The step with all that was added."""
        plan = StepPlan(step, self.frees, self.inits, self.tables, self.work)
        return ScheduledStep(
            plan, self.requests, self.holdings, self.prefill_tokens, self.decode_sequences, self.kv_tokens
        )

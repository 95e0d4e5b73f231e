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
    kv_tokens: int = 0
    preempted: bool = False

    def add(self, request: Request, table: BlockTable, count: int) -> None:
        start = request.computed
        end = start + count
        sample = count == request.missing
        self.work.append(Work(request.row, start, count, sample))
        self.requests.append(request)
        self.holdings.append(table)
        self.budget -= count
        self.kv_tokens += end
        if count > 1:
            self.prefill_tokens += count
        request.computed = end
        if sample:
            request.in_flight += 1

    def finish(self, step: int) -> ScheduledStep:
        """The step with all that was added."""
        plan = StepPlan(step, self.frees, self.inits, self.tables, self.work)
        decode = sum(1 for work in self.work if work.count == 1)
        return ScheduledStep(plan, self.requests, self.holdings, self.prefill_tokens, decode, self.kv_tokens)

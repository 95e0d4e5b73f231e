"""The scheduler: which positions of which rows are computed in the next step.

It knows one rule. Every request wants its computed positions to reach its tokens (plus the one being sampled), and a
step has a budget of tokens to spend. A prompt longer than the budget is computed in chunks, a prefix hit or a
preemption only changes how many positions are missing, and a decoding request is one that misses a single position.

A plan may be made while earlier steps still run: sampled tokens that nobody has read back yet count as tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

from headrace_worker.guide import TokenGuide
from headrace_worker.kv.manager import BlockTable, KVManager
from headrace_worker.plan import RowInit, StepResult, TableUpdate
from headrace_worker.queue import WaitingQueue
from headrace_worker.request import Finish, Output, Request
from headrace_worker.scheduled_step import ScheduledStep, StepDraft

GUIDE_FAILED = "what constrains this output failed on it; ask without the constraint, or with a simpler one"


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """max_num_seqs rows, max_num_batched_tokens positions per step, max_waiting queued requests.

    With `batches` > 1 that many steps are in different pipeline stages at a time. A request is then in one of them
    only, as its next position needs the token that comes out at the end, and each takes its share of the requests.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int = 4096
    watermark: float = 0.01  # share of the pool that an admission leaves free while others run
    batches: int = 1


@dataclass(slots=True)
class SchedulerCounters:
    """Monotonic counts for metrics."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0


class Scheduler:
    """Continuous batching over one pool of blocks. Not thread-safe: the step loop owns it."""

    def __init__(self, limits: SchedulerLimits, kv: KVManager, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.kv = kv
        self.waiting = WaitingQueue()
        self.running: list[Request] = []
        self.counters = SchedulerCounters()
        self._clock = clock
        self._rows = list(range(limits.max_num_seqs - 1, -1, -1))
        self._generations = [0] * limits.max_num_seqs
        self._freed_rows: list[int] = []
        self._deadlines: list[tuple[float, int, Request]] = []
        self._step = 0
        self._arrivals = 0
        self._suspects = 0
        self._guided = 0  # rows whose request has a guide

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    @property
    def missing_tokens(self) -> int:
        """Positions to compute before everyone who is here has caught up."""
        running = self.running
        return self.waiting.tokens + sum([len(entry.tokens) + entry.in_flight - entry.computed for entry in running])

    @property
    def is_full(self) -> bool:
        return len(self.waiting) >= self.limits.max_waiting

    def next_deadline(self) -> float | None:
        return self._deadlines[0][0] if self._deadlines else None

    def add(self, request: Request) -> None:
        """Queues a request. The caller has checked its lengths and `is_full`."""
        self.waiting.push(request)
        if request.deadline is not None:
            self._arrivals += 1
            heappush(self._deadlines, (request.deadline, self._arrivals, request))

    def end(self, request: Request, finish: Finish, error: str = "") -> Output:
        """Ends a request in any phase: its row and blocks are free at once."""
        self.waiting.remove(request)
        self._leave(request)
        self._clear_suspicion(request)
        request.finish = finish
        return Output(
            request.attempt_id,
            request.emitted - request.prompt_len,
            [],
            finish=finish,
            error=error,
            preemptions=request.preemptions,
        )

    def detach(self, request: Request) -> BlockTable | None:
        """Ends a running request but leaves its blocks to the caller, who releases the table."""
        table, request.table = request.table, None
        self._leave(request)
        self._clear_suspicion(request)
        request.finish = Finish.STOP
        return table

    def expire(self) -> list[Output]:
        """Ends the requests whose deadline has passed."""
        now = self._clock()
        ended: list[Output] = []
        while self._deadlines and (self._deadlines[0][0] <= now or self._deadlines[0][2].finish is not None):
            request = heappop(self._deadlines)[2]
            if request.finish is None:
                ended.append(self.end(request, Finish.DEADLINE, "the request's deadline has passed"))
        return ended

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None when nothing can be computed now."""
        draft = StepDraft(self.limits.max_num_batched_tokens, self._freed_rows)
        if self._suspects:
            self._schedule_suspect(draft)
        else:
            self._schedule_running(draft)
            if not draft.preempted:
                self._admit(draft)
        if not draft.work:
            return None
        self._freed_rows = []
        self._step += 1
        return draft.finish(self._step, may_be_guided=self._guided > 0)

    def process(self, step: ScheduledStep, result: StepResult) -> list[Output]:
        """Takes in what a step sampled. Tokens of requests that ended meanwhile are dropped, never counted."""
        outputs: list[Output] = []
        tokens, failed = result.tokens, result.failed
        index = 0
        for work, request, table in zip(step.plan.work, step.requests, step.holdings, strict=True):
            if not work.sample:
                if request.table is table:
                    self.kv.publish(table, request.chain, request.tokens, work.start + work.count)
                continue
            position, index = index, index + 1
            request.in_flight -= 1
            if request.finish is not None or step.plan.step <= request.void_until:
                continue
            if position in failed:
                outputs.append(self.end(request, Finish.ERROR, failed[position]))
                continue
            if request.suspect:
                self._clear_suspicion(request)
            if request.guide is not None and not _guided_by(request.guide, request, tokens[position]):
                outputs.append(self.end(request, Finish.ERROR, GUIDE_FAILED))
                continue
            request.tokens.append(tokens[position])
            if request.table is table and work.start + work.count >= table.unpublished_end:
                self.kv.publish(table, request.chain, request.tokens, work.start + work.count)
            outputs.append(self._emit(request, position, result))
        return outputs

    def fail(self, step: ScheduledStep, sentence: str) -> list[Output]:
        """A step raised. A request alone in it is at fault; of several each is tried again alone (RELIABILITY R9).

        Steps that were launched on top of it drew from what it left behind: they mean nothing to its requests.
        """
        for work, request in zip(step.plan.work, step.requests, strict=True):
            if work.sample:
                request.in_flight -= 1
        number = step.plan.step
        alive = [request for request in step.requests if request.finish is None and number > request.void_until]
        if len(step.requests) == len(alive) == 1:
            return [self.end(alive[0], Finish.ERROR, sentence)]
        for request in alive:
            request.void_until = self._step
            if not request.suspect:
                request.suspect = True
                self._suspects += 1
            if request.row >= 0:
                self._preempt(request)
        return []

    def check(self, others: Sequence[int] = ()) -> None:
        """Raises RuntimeError unless blocks, rows and tables agree; `others`: blocks held by no request of here."""
        self.kv.pool.check()
        held: dict[int, int] = dict.fromkeys(others, 1)
        for request in self.running:
            if request.table is None or request.row < 0:
                raise RuntimeError("a running request holds no row")
            if request.table.capacity < request.computed:
                raise RuntimeError("a request computed more than it holds")
            for block in request.table.held():
                held[block] = held.get(block, 0) + 1
        for request in self.waiting:
            if request.table is not None or request.row >= 0:
                raise RuntimeError("a waiting request holds a row")
        if len(held) != self.kv.pool.used:
            raise RuntimeError(f"requests hold {len(held)} blocks, the pool counts {self.kv.pool.used} used")
        rows = [request.row for request in self.running] + self._rows
        if sorted(rows) != list(range(self.limits.max_num_seqs)):
            raise RuntimeError("rows are lost or held twice")

    def _schedule_running(self, draft: StepDraft) -> None:
        """Requests that miss one position first, so that a long prompt never holds a stream up.

        A share of the budget is kept for prompts that wait, and who got no turn is first in the next step: with
        more requests than budget, nobody starves.
        """
        single: list[Request] = []
        chunks: list[Request] = []
        one_batch = self.limits.batches == 1
        for request in self.running:
            if request.in_flight and not one_batch:
                continue
            known = len(request.tokens) + request.in_flight
            missing = known - request.computed
            if missing > 1 or (missing and request.prefill_only):
                chunks.append(request)
            elif missing == 1 and known < request.max_len:
                single.append(request)
        someone_waits = bool(chunks) or (len(self.waiting) > 0 and bool(self._rows))
        reserve = min(self.kv.block_size, draft.budget // 8) if someone_waits else 0
        turns = min(draft.budget - reserve, -(-len(self.running) // self.limits.batches))
        if len(single) > turns:
            served = set(map(id, single[:turns]))
            self.running.sort(key=lambda request: id(request) in served)
            del single[turns:]
        for request in single:
            if request.row >= 0:
                table = request.table
                if table is not None and request.computed < table.capacity:
                    draft.add_last(request, table)
                else:
                    self._place(draft, request, 1)
        for request in chunks:
            if request.row >= 0 and draft.budget > 0:
                self._place(draft, request, min(request.missing, draft.budget))

    def _place(self, draft: StepDraft, request: Request, count: int) -> None:
        """Adds work for a running request; makes room by preempting the last that came, itself in the end."""
        table = request.table
        if table is None:
            return
        end = request.computed + count
        if end > table.capacity:
            updates = self.kv.grow(table, request.row, request.computed, end)
            while updates is None:
                victim = self._victim(draft) or request
                draft.preempted = True
                self._preempt(victim)
                if victim is request:
                    return
                updates = self.kv.grow(table, request.row, request.computed, end)
            draft.tables.extend(updates)
        draft.add(request, table, count)

    def _victim(self, draft: StepDraft) -> Request | None:
        """The running request of least priority, latest arrival first, that this step does not compute."""
        planned = {id(request) for request in draft.requests}
        candidates = [request for request in self.running if id(request) not in planned]
        return max(candidates, key=lambda request: (request.priority, request.arrival), default=None)

    def _admit(self, draft: StepDraft) -> None:
        while draft.budget > 0 and self._rows:
            request = self.waiting.peek()
            if request is None or request.in_flight > 0 or not self._admit_one(draft, request):
                return

    def _admit_one(self, draft: StepDraft, request: Request) -> bool:
        tokens = request.tokens
        self.kv.extend_chain(request.chain, tokens, len(tokens) // self.kv.block_size)
        hit = self.kv.lookup(request.chain, len(tokens) - 1)
        chunk_end = hit.tokens + min(len(tokens) - hit.tokens, draft.budget)
        spare = int(self.kv.pool.total * self.limits.watermark) if self.running else 0
        if self.kv.cost_of(hit, chunk_end) + spare > self.kv.pool.available:
            return False
        self.waiting.remove(request)
        table = self.kv.adopt(hit)
        request.table = table
        request.computed = hit.tokens
        request.row = self._rows.pop()
        self._guided += request.guide is not None
        self._generations[request.row] += 1
        self.running.append(request)
        self.counters.prefix_queries += len(tokens)
        self.counters.prefix_hits += hit.tokens
        if request.started is None:
            request.started = self._clock()
            request.cached_tokens = min(hit.tokens, request.prompt_len)
        draft.inits.append(
            RowInit(request.row, self._generations[request.row], list(tokens), request.prompt_len, request.sampling)
        )
        draft.tables.extend(
            TableUpdate(group, request.row, 0, list(blocks)) for group, blocks in enumerate(table.tables) if blocks
        )
        self._place(draft, request, chunk_end - hit.tokens)
        return True

    def _schedule_suspect(self, draft: StepDraft) -> None:
        """One suspect alone: the one that runs, or else the next that waits; others make room if they must."""
        for request in self.running:
            if request.suspect:
                if request.missing > 0 and request.in_flight == 0:
                    self._place(draft, request, min(request.missing, draft.budget))
                return
        request = next(request for request in self.waiting if request.suspect)
        if request.in_flight > 0:
            return
        while not (self._rows and self._admit_one(draft, request)):
            victim = self._victim(draft)
            if victim is None:
                return
            self._preempt(victim)

    def _emit(self, request: Request, position: int, result: StepResult) -> Output:
        """Delivers the request's newest token, and its end when this token ends it."""
        token = request.tokens[-1]
        count = request.emitted = len(request.tokens)
        finish = None
        if token in request.stop_ids or request.complete:
            finish = Finish.STOP
        elif count >= request.max_len:
            finish = Finish.LENGTH
        logprobs = [result.logprobs[position]] if position in result.logprobs else []
        output = Output(
            request.attempt_id,
            count - 1 - request.prompt_len,
            [token],
            logprobs,
            finish,
            preemptions=request.preemptions,
        )
        if not request.announced:
            request.announced = True
            self.counters.prompt_tokens += request.prompt_len  # once it is computed: what was refused never counts
            output.cached_tokens = request.cached_tokens
            output.queue_seconds = (request.started or request.arrival) - request.arrival
        self.counters.generation_tokens += 1
        if finish is not None:
            self.waiting.remove(request)
            self._leave(request)
            request.finish = finish
        return output

    def _preempt(self, request: Request) -> None:
        """Back to the queue: blocks are given up, and what is not found again is computed again."""
        self._leave(request)
        request.computed = 0
        request.preemptions += 1
        self.counters.preemptions += 1
        self.waiting.push(request)

    def _leave(self, request: Request) -> None:
        if request.row >= 0:
            self.running.remove(request)
            self._rows.append(request.row)
            self._freed_rows.append(request.row)
            request.row = -1
            self._guided -= request.guide is not None
        if request.table is not None:
            self.kv.release(request.table)
            request.table = None

    def _clear_suspicion(self, request: Request) -> None:
        if request.suspect:
            request.suspect = False
            self._suspects -= 1


def _guided_by(guide: TokenGuide, request: Request, token: int) -> bool:
    """Has a guide take in the token that was drawn, unless it ends the request anyway; False when the guide fails."""
    try:
        if token not in request.stop_ids:
            guide.advance(token)
            request.complete = guide.finished
    except Exception:
        return False
    return True

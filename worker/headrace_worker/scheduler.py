"""The scheduler: which positions of which rows are computed in the next step.

It knows one rule. Every request wants its computed positions to reach its tokens (plus the one being sampled), and a
step has a budget of tokens to spend. A prompt longer than the budget is computed in chunks, a prefix hit or a
preemption only changes how many positions are missing, and a decoding request is one that misses a single position.

A plan may be made while earlier steps still run: sampled tokens that nobody has read back yet count as tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace_worker.deadlines import Deadlines
from headrace_worker.kv.manager import BlockTable, KVManager
from headrace_worker.plan import StepResult, TableUpdate
from headrace_worker.request import Finish, Output, Request
from headrace_worker.roster import Roster
from headrace_worker.scheduled_step import ScheduledStep, StepDraft
from headrace_worker.scheduler_counters import SchedulerCounters

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


class Scheduler:
    """Continuous batching over one pool of blocks. Not thread-safe: the step loop owns it."""

    def __init__(self, limits: SchedulerLimits, kv: KVManager, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.kv = kv
        self.counters = SchedulerCounters()
        self._clock = clock
        self._roster = Roster(limits.max_num_seqs, kv)
        self.waiting = self._roster.waiting
        self.running = self._roster.running
        self._deadlines = Deadlines()
        self._step = 0

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
        return self._deadlines.next

    def add(self, request: Request) -> None:
        """Queues a request. The caller has checked its lengths and `is_full`."""
        self.waiting.push(request)
        self._deadlines.add(request)

    def end(self, request: Request, finish: Finish, error: str = "") -> Output:
        """Ends a request in any phase: its row and blocks are free at once."""
        self._roster.dismiss(request)
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
        self._roster.dismiss(request)
        request.finish = Finish.STOP
        return table

    def expire(self) -> list[Output]:
        """Ends the requests whose deadline has passed."""
        passed = self._deadlines.pass_to(self._clock())
        return [self.end(request, Finish.DEADLINE, "the request's deadline has passed") for request in passed]

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None when nothing can be computed now."""
        draft = StepDraft(self.limits.max_num_batched_tokens, self._roster.rows.given_back)
        if self._roster.suspects:
            self._schedule_suspect(draft)
        else:
            self._schedule_running(draft)
            if not draft.preempted:
                self._admit(draft)
        if not draft.work:
            return None
        self._roster.rows.told()
        self._step += 1
        return draft.finish(self._step, may_be_guided=self._roster.guided > 0)

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
                self._roster.trust(request)
            if request.guide is not None and not request.guide_takes(tokens[position]):
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
            self._roster.suspect(request)
            if request.row >= 0:
                self._preempt(request)
        return []

    def check(self, others: Sequence[int] = ()) -> None:
        """Raises RuntimeError unless blocks, rows and tables agree; `others`: blocks held by no request of here."""
        self._roster.check(others)

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
        someone_waits = bool(chunks) or (len(self.waiting) > 0 and bool(self._roster.rows))
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
        while draft.budget > 0 and self._roster.rows:
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
        draft.inits.append(self._roster.admit(request, hit))
        self.counters.prefix_queries += len(tokens)
        self.counters.prefix_hits += hit.tokens
        if request.started is None:
            request.started = self._clock()
            request.cached_tokens = min(hit.tokens, request.prompt_len)
        draft.tables.extend(
            TableUpdate(group, request.row, 0, list(blocks)) for group, blocks in enumerate(hit.tables) if blocks
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
        while not (self._roster.rows and self._admit_one(draft, request)):
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
            self._roster.dismiss(request)
            request.finish = finish
        return output

    def _preempt(self, request: Request) -> None:
        self._roster.send_back(request)
        self.counters.preemptions += 1

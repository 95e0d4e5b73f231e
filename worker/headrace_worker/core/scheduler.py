"""The scheduler: which positions of which rows are computed in the next step.

There is one rule. The computed positions of every request must reach its tokens (plus the one being sampled), and a
step has a budget of tokens. A prompt longer than the budget is computed in chunks, a prefix hit or a preemption only
changes how many positions are missing, and a decoding request is one that misses a single position.

A plan may be made while earlier steps still run: sampled tokens that are not read back yet count as tokens.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace_worker.core.guide import GUIDE_FAILED
from headrace_worker.core.kv.manager import BlockTable, KVManager, PrefixHit
from headrace_worker.core.kv.states import StateSlots
from headrace_worker.core.plan import StepResult, TableUpdate
from headrace_worker.core.queue import Deadlines, WaitingQueue, divide_budget
from headrace_worker.core.request import Finish, Output, Request
from headrace_worker.core.request_table import RequestTable
from headrace_worker.core.request_times import StepTotals
from headrace_worker.core.scheduled_step import ScheduledStep, StepDraft


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """max_num_seqs rows, max_num_batched_tokens positions per step, max_waiting queued requests.

    With `batches` > 1 that many steps are in different pipeline stages at a time. A request is then in only one of
    them, as its next position needs the token sampled at the end, and each step gets an equal share of the requests.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    watermark: float = 0.01  # share of the pool that an admission leaves free while other requests run
    batches: int = 1


@dataclass(slots=True)
class SchedulerCounters:
    """Monotonic counts for metrics."""

    prompt_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0  # tokens
    prefix_hits: int = 0  # tokens
    preemptions: int = 0
    not_finite: int = 0  # attempts that ended since their logits were not finite

    def count_lookup(self, tokens: int, found: int) -> None:
        """Counts a lookup of a request's tokens in this replica's prefix cache."""
        self.prefix_queries += tokens
        self.prefix_hits += found


class Followers:
    """Waiting requests whose next block is being computed for another: admitted now, they would compute it again.

    The first request of a burst with one prompt computes it, and the others start from its blocks: they are set aside
    in the queue until the block is there, or will not be.
    """

    def __init__(
        self, running: Sequence[Request], waiting: WaitingQueue, block_size: int, states: StateSlots | None = None
    ) -> None:
        """running: kept current by the caller. states: of a model with recurrent layers."""
        self._running = running
        self._waiting = waiting
        self._block_size = block_size
        self._states = states
        self._entries: list[tuple[Request, Request, BlockTable, int]] = []  # follower, leader, its table, last block

    def set_aside(self, request: Request, hit: PrefixHit) -> bool:
        """Whether the waiting request, which would start from `hit`, waits for a running one instead."""
        block, usable = hit.tokens // self._block_size, (len(request.tokens) - 1) // self._block_size
        if block >= usable:
            return False  # what is missing cannot be shared
        mine = request.chain.digests[0]
        for leader in self._running:
            table, digests = leader.table, leader.chain.digests[0]
            if table is None or block >= len(digests) or digests[block] != mine[block]:
                continue
            last = -1
            if self._states is not None:  # it starts where there is a snapshot
                most = 1 + _last_shared(mine, digests, block, min(usable, len(digests)))
                last = self._states.share(table.state, block, most) - 1
            elif table.published <= block:
                last = _last_shared(mine, digests, block, min(usable, len(digests)))
            if last >= block:
                self._waiting.set_aside(request)
                self._entries.append((request, leader, table, last))
                return True
        return False

    def restore(self) -> None:
        """Queues those again that need not wait any longer."""
        kept = []
        for entry in self._entries:
            request, leader, table, block = entry
            if leader.table is table and table.published <= block:
                kept.append(entry)
            else:
                self._waiting.restore(request)
        self._entries = kept


def _last_shared(mine: Sequence[bytes], others: Sequence[bytes], shared: int, end: int) -> int:
    """The last block before `end` that both have; `shared` is one. A digest depends on all blocks before its own."""
    later = range(shared + 1, end)
    return shared + bisect_left(later, True, key=lambda block: mine[block] != others[block])


class BlockSearch:
    """Blocks for the waiting request that comes next.

    It remembers the request that found too few: others may be preempted for it, and no budget is kept for it.
    """

    def __init__(self, kv: KVManager, watermark: float) -> None:
        """watermark: the share of the pool that stays free while other requests run."""
        self._kv = kv
        self._watermark = watermark
        self._failed: Request | None = None

    def failed(self, request: Request) -> bool:
        """Whether the last search was for this request, and found too few blocks."""
        return request is self._failed

    def find(self, request: Request, budget: int, *, idle: bool) -> tuple[PrefixHit, int] | None:
        """The cached prefix and the end of the first chunk; None if there are too few blocks for it.

        budget: tokens of the step. idle: no request runs.
        """
        kv, tokens = self._kv, request.tokens
        kv.extend_chain(request.chain, tokens, len(tokens) // kv.block_size)
        usable = min(len(tokens) - 1, len(request.prompt_logprobs)) if request.scores else len(tokens) - 1
        hit = kv.lookup(request.chain, usable)
        chunk_end = hit.tokens + min(len(tokens) - hit.tokens, budget)
        spare = 0 if idle else int(kv.pool.total * self._watermark)
        # Few borders of a prompt with recurrent state are cached: the prompt starts again only when all of it fits.
        needed = len(tokens) if kv.states is not None and request.preemptions and not idle else chunk_end
        found = kv.cost_of(hit, needed) + spare <= kv.pool.available
        self._failed = None if found else request
        return (hit, chunk_end) if found else None


class Emitter:
    """Outputs of requests: the newest token of each; with the first and the last token what is known of its time."""

    def __init__(self, counters: SchedulerCounters, totals: StepTotals, clock: Callable[[], float]) -> None:
        self._counters = counters
        self._totals = totals
        self._clock = clock

    def emit(self, request: Request, position: int, result: StepResult) -> Output:
        """The request's newest token, and its end when this token ends it; the caller ends it then."""
        token = request.tokens[-1]
        count = request.emitted = len(request.tokens)
        finish = None
        if token in request.stop_ids:
            finish = Finish.STOP
        elif request.complete:
            finish = Finish.COMPLETE
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
        times = request.times
        if times.preempted_at is not None:
            times.resumed(self._clock())
        if not request.has_output:
            request.has_output = True
            if request.counts_prompt:  # counted once it is computed: a refused prompt never counts
                self._counters.prompt_tokens += request.prompt_len
            output.cached_tokens = request.cached_tokens
            output.prompt_logprobs, request.prompt_logprobs = request.prompt_logprobs, []
            started = request.started or request.arrival
            output.queue_seconds = started - request.arrival
            output.times = times.first_token(self._clock(), started, self._totals)
        elif finish is not None:
            output.times = times.end(self._clock(), self._totals)
        self._counters.generation_tokens += 1
        return output


LOOKED_UP_BLOCKS = 32_768  # by admissions of one step: some ten milliseconds; the others follow in the next steps


class Scheduler:
    """Continuous batching over one pool of blocks. Not thread-safe: the step loop owns it."""

    def __init__(self, limits: SchedulerLimits, kv: KVManager, clock: Callable[[], float]) -> None:
        self.limits = limits
        self.kv = kv
        self.counters = SchedulerCounters()
        self.totals = StepTotals()
        self._emitter = Emitter(self.counters, self.totals, clock)
        self._clock = clock
        self._request_table = RequestTable(limits.max_num_seqs, kv)
        self.waiting = self._request_table.waiting
        self.running = self._request_table.running
        self._deadlines = Deadlines()
        self._step = 0
        self._blocks = BlockSearch(kv, limits.watermark)
        self._followers = Followers(self.running, self.waiting, kv.block_size, kv.states)

    @property
    def has_work(self) -> bool:
        return bool(self.running) or len(self.waiting) > 0

    @property
    def missing_tokens(self) -> int:
        """Positions to compute until no request misses any."""
        running = self.running
        return self.waiting.tokens + sum([len(entry.tokens) + entry.in_flight - entry.computed for entry in running])

    def has_room(self, tenant: bytes, elsewhere: Counter[bytes]) -> bool:
        """Whether a request of the tenant may be queued. elsewhere: per tenant, those that will be queued later."""
        return self.waiting.has_room(tenant, self.limits.max_waiting, elsewhere)

    def add(self, request: Request) -> None:
        """Queues a request. The caller has checked its lengths and `has_room`."""
        if request.source:
            request.times.fetched = self._clock() - request.arrival
        self.waiting.push(request)
        self._deadlines.add(request)

    def end(self, request: Request, finish: Finish, error: str = "") -> Output:
        """Ends a request in any phase: its row and blocks are free at once."""
        self._request_table.remove(request)
        request.finish = finish
        index = request.emitted - request.prompt_len
        return Output(request.attempt_id, index, [], finish=finish, error=error, preemptions=request.preemptions)

    def expire(self) -> list[Output]:
        """Ends the requests whose deadline has passed."""
        passed = self._deadlines.take_expired(self._clock())
        return [self.end(request, Finish.DEADLINE, "the request's deadline has passed") for request in passed]

    def schedule(self) -> ScheduledStep | None:
        """The next step, or None when nothing can be computed now."""
        draft = StepDraft(self.limits.max_num_batched_tokens, self._request_table.rows.freed, self.kv.states)
        self._followers.restore()
        if self._request_table.suspects:
            self._schedule_suspect(draft)
        else:
            self._make_room(draft.budget)
            self._schedule_running(draft)
            if not draft.preempted:
                self._admit(draft)
        if not draft.work:
            return None
        self._request_table.rows.clear_freed()
        self._step += 1
        return draft.finish(self._step, may_be_guided=self._request_table.guided > 0)

    def process(self, step: ScheduledStep, result: StepResult) -> list[Output]:
        """Processes the samples of a step. Tokens of requests that ended meanwhile are dropped, never counted."""
        outputs: list[Output] = []
        tokens, failed = result.tokens, result.failed
        index = 0
        scores = 0
        for work, request, table in zip(step.plan.work, step.requests, step.block_tables, strict=True):
            if work.scored:
                if request.finish is None and step.plan.step > request.discard_until_step:
                    found = result.prompt_logprobs[scores : scores + work.scored]
                    request.prompt_logprobs[work.start : work.start + work.scored] = found
                scores += work.scored
            if not work.sample:
                if request.table is table:
                    self.kv.publish(table, request.chain, request.tokens, work.start + work.count)
                continue
            position, index = index, index + 1
            request.in_flight -= 1
            if request.finish is not None or step.plan.step <= request.discard_until_step:
                continue
            if position in failed:
                outputs.append(self._end_failed(request, table, failed[position], position in result.not_finite))
                continue
            if request.suspect:
                self._request_table.clear_suspect(request)
            if request.guide is not None and not request.advance_guide(tokens[position]):
                outputs.append(self.end(request, Finish.ERROR, GUIDE_FAILED))
                continue
            request.tokens.append(tokens[position])
            if request.table is table and work.start + work.count >= table.unpublished_end:
                self.kv.publish(table, request.chain, request.tokens, work.start + work.count)
            output = self._emitter.emit(request, position, result)
            if output.finish is not None:
                self._request_table.remove(request)
                request.finish = output.finish
            outputs.append(output)
        return outputs

    def _end_failed(self, request: Request, table: BlockTable, sentence: str, not_finite: bool) -> Output:
        """Sampling failed for the request. What it computed, or started from, is not used again if it is in doubt."""
        if not not_finite:
            return self.end(request, Finish.ERROR, sentence)
        self.counters.not_finite += 1
        if request.table is table:
            self.kv.forget(table, request.chain)
        return self.end(request, Finish.NOT_FINITE, sentence)

    def fail(self, step: ScheduledStep, sentence: str) -> list[Output]:
        """A step raised. A single request in it is the cause; several are each retried alone.

        Steps launched after it used its KV and tokens: their results for its requests are discarded.
        """
        for work, request in zip(step.plan.work, step.requests, strict=True):
            if work.sample:
                request.in_flight -= 1
        number = step.plan.step
        alive = [request for request in step.requests if request.finish is None and number > request.discard_until_step]
        if len(step.requests) == len(alive) == 1:
            return [self.end(alive[0], Finish.ERROR, sentence)]
        for request in alive:
            request.discard_until_step = self._step
            self._request_table.mark_suspect(request)
            if request.row >= 0:
                self._preempt(request)
        return []

    def check(self, others: Sequence[int] = (), slots: Sequence[int] = ()) -> None:
        """Raises RuntimeError unless blocks, rows and tables agree; others, slots: held outside of the scheduler."""
        self._request_table.check(others, slots)

    def _schedule_running(self, draft: StepDraft) -> None:
        """Requests that miss one position first, so that a long prompt never delays a stream.

        A share of the budget is reserved for waiting prompts, and requests that are left out come first in the next
        step: with more requests than budget, no request starves.
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
        prompts_wait = bool(chunks) or (len(self.waiting) > 0 and bool(self._request_table.rows))
        reserve = min(self.kv.block_size, draft.budget // 8) if prompts_wait else 0
        slots = min(draft.budget - reserve, -(-len(self.running) // self.limits.batches))
        if len(single) > slots:
            served = set(map(id, single[:slots]))
            self.running.sort(key=lambda request: id(request) in served)
            del single[slots:]
        for request in single:
            if request.row >= 0:
                table = request.table
                if table is not None and request.computed < table.capacity:
                    draft.add_last(request, table)
                else:
                    self._add_work(draft, request, 1)
        if not chunks:
            return
        wanted = [(request.tenant_salt, request.missing) for request in chunks]
        counts = divide_budget(wanted, draft.budget, self._admissible_tenant())
        for request, count in zip(chunks, counts, strict=True):
            count = min(count, draft.room(request))
            if request.row >= 0 and count > 0:
                self._add_work(draft, request, count)

    def _add_work(self, draft: StepDraft, request: Request, count: int) -> None:
        """Adds work for a running request; if blocks are short, preempts others, at last itself."""
        table = request.table
        if table is None:
            return
        end = request.computed + count
        if end > table.capacity:
            updates = self.kv.grow(table, request.row, request.computed, end)
            while updates is None:
                victim = self._request_table.least_urgent(draft.requests) or request
                draft.preempted = True
                self._preempt(victim)
                if victim is request:
                    return
                updates = self.kv.grow(table, request.row, request.computed, end)
            draft.tables.extend(updates)
        draft.add(request, table, count)

    def _make_room(self, budget: int) -> None:
        """Preempts one request for one of a tenant that runs none: it would wait until others' answers end."""
        request = self.waiting.peek()
        if request is None:
            return
        if self._blocks.failed(request):
            self._blocks.find(request, budget, idle=not self.running)  # some may have been released since
        if self._blocks.failed(request) or not self._request_table.rows:
            victim = self._request_table.in_excess(request)
            if victim is not None:
                self._preempt(victim)

    def _admissible_tenant(self) -> frozenset[bytes]:
        """The tenant of the request that may be admitted in this step."""
        request = self.waiting.peek() if self._request_table.rows else None
        if request is None or request.in_flight or self._blocks.failed(request):
            return frozenset()
        return frozenset((request.tenant_salt,))

    def _admit(self, draft: StepDraft) -> None:
        looked_up = 0
        while draft.budget > 0 and self._request_table.rows and looked_up < LOOKED_UP_BLOCKS:
            request = self.waiting.peek()
            if request is None or request.in_flight > 0:
                return
            if draft.room(request) <= 0:
                return
            found = self._blocks.find(request, draft.room(request), idle=not self.running)
            if found is None:
                return
            looked_up += 1 + found[0].covered // self.kv.block_size
            if request.scores or not self._followers.set_aside(request, found[0]):
                self._start(draft, request, *found)

    def _start(self, draft: StepDraft, request: Request, hit: PrefixHit, chunk_end: int) -> None:
        draft.inits.append(self._request_table.admit(request, hit))
        if request.started is None:  # later hits include blocks that it computed itself
            request.started = self._clock()
            request.cached_tokens = min(request.fetched.cached_hit(hit.tokens), request.prompt_len)
            request.times.started(len(request.tokens) - hit.tokens, self.totals)
            if self.kv.states is not None:
                request.times.snapshot_tokens, request.times.covered_tokens = hit.tokens, hit.covered
            self.counters.count_lookup(len(request.tokens), request.fetched.local_hit(hit.tokens))
        draft.tables.extend(
            TableUpdate(group, request.row, 0, list(blocks)) for group, blocks in enumerate(hit.tables) if blocks
        )
        self._add_work(draft, request, chunk_end - hit.tokens)

    def _schedule_suspect(self, draft: StepDraft) -> None:
        """One suspect alone: the running one, or else the next waiting one; others are preempted if necessary."""
        for request in self.running:
            if request.suspect:
                if request.missing > 0 and request.in_flight == 0:
                    self._add_work(draft, request, min(request.missing, draft.room(request)))
                return
        request = next(request for request in self.waiting if request.suspect)
        if request.in_flight > 0:
            return
        while True:
            if self._request_table.rows and (
                found := self._blocks.find(request, draft.room(request), idle=not self.running)
            ):
                self._start(draft, request, *found)
                return
            victim = self._request_table.least_urgent(draft.requests)
            if victim is None:
                return
            self._preempt(victim)

    def _preempt(self, request: Request) -> None:
        if request.times.preempted_at is None:
            request.times.preempted_at = self._clock()
        self._request_table.preempt(request)
        self.counters.preemptions += 1

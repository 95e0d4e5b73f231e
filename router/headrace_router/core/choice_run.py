"""Runs one choice from its first placement to its end, over all of its attempts: pure, driven by calls.

    begin ──▶ place ──▶ running ── tokens ──▶ … ──▶ ended
              ▲   │        │ refused, lost, moved
    timer ────┘   └ none   │
              ▲◀───────────┘

A run never acts inside the call that ends an attempt: `Timers.soon` schedules the rest, so that no placement happens
while a frame is read.

The choices of one prompt are placed together: the first one leads, the others wait for it (`SharedPrompt`).
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol

from headrace_proto.replica_pb2 import Submit, TokenLogprobs
from headrace_router.core.attempt import Attempt, Outcome
from headrace_router.core.errors import DeadlineError
from headrace_router.core.placement import KvSource, MustWaitError, Placed, Placement
from headrace_router.core.policy.interface import ChoiceRequest
from headrace_router.core.replica_state import C, ReplicaState
from headrace_router.core.retry import RetryState


class ChoiceOutput(Protocol):
    """The answer generated so far; the next attempt continues from its tokens."""

    @property
    def output_token_ids(self) -> Sequence[int]: ...

    @property
    def done(self) -> bool:
        """Whether it is complete or failed; after a stop string, before the replica reports the end."""

    @property
    def failure(self) -> Exception | None: ...


class RunListener(Protocol):
    """Receives a run's events. `ended` comes last, once, and not after `ChoiceRun.cancel`."""

    def placed(self, placed: Placed[Any]) -> None:
        """An attempt starts."""

    def add_tokens(
        self, attempt: Attempt, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], finish: int, error: str
    ) -> None:
        """The next tokens, to be added to the output; called while their frame is read."""

    def left(self, replica_id: str, outcome: Outcome, begun: bool) -> None:
        """An attempt there was refused, lost or moved, and the choice continues. `begun`: tokens were sent."""

    def ended(self, attempt: Attempt | None, failure: Exception | None) -> None:
        """The output is complete, by this attempt, or the choice failed."""


class Timers(Protocol):
    """The clock and timers of a run, in seconds on one monotonic clock. A timer is the function that cancels it."""

    def now(self) -> float: ...

    def soon(self, call: Callable[[], None]) -> Callable[[], None]:
        """Calls after the current call has returned."""

    def after(self, seconds: float, call: Callable[[], None]) -> Callable[[], None]: ...


SHARED_TOKENS = 64  # least tokens of a prompt whose choices wait until the first choice has computed it


class SharedPrompt(Generic[C]):
    """The first choice sets `replica` and calls `release`; the others `wait`."""

    def __init__(self, tokens: int) -> None:
        self.replica: ReplicaState[C] | None = None  # the replica that runs the first choice
        self.long = tokens >= SHARED_TOKENS
        self.computed = not self.long  # or the first choice has ended: a further one can start
        self._waiting: list[Callable[[Exception | None], None]] = []

    def wait(self, start: Callable[[Exception | None], None]) -> None:
        """Calls `start` when the prompt is computed, with the failure of the first choice if it has failed before."""
        self._waiting.append(start)

    def release(self, failure: Exception | None = None) -> None:
        """The prompt is computed, or the first choice has ended. Idempotent."""
        self.computed = True
        waiting, self._waiting = self._waiting, []
        for start in waiting:
            start(failure)


class ChoiceRun(Generic[C]):
    """`begin` it once; `cancel` it when the client disconnects. An error of a collaborator becomes its failure."""

    def __init__(
        self,
        request: ChoiceRequest,
        output: ChoiceOutput,
        placement: Placement[C],
        retry: RetryState[ReplicaState[C]],
        timers: Timers,
        listeners: Sequence[RunListener],
        leader: "ChoiceRun[C] | None" = None,
    ) -> None:
        """listeners: each gets every event, in order. leader: the run of the prompt's first choice; None = this one."""
        self.attempt: Attempt | None = None  # the running one
        self.replica: ReplicaState[C] | None = None  # that runs it
        self.prompt: SharedPrompt[C] = leader.prompt if leader else SharedPrompt(len(request.prompt_token_ids))
        self._request = request
        self._output = output
        self._placement = placement
        self._retry = retry
        self._timers = timers
        self._listeners = listeners
        self._began = 0.0
        self._ended = False
        self._cancel_next: Callable[[], None] | None = None
        self._cancel_deadline: Callable[[], None] | None = None
        self._source: KvSource[C] | None = None  # where the running attempt gets KV blocks
        self._previous: ReplicaState[C] | None = None  # the stream's last replica, if it may still have its blocks
        self._kept: Attempt | None = None  # whose blocks stay there until the next attempt has tokens
        self._target: object = None  # the replica that a moved stream was assigned to
        self._leads = leader is None
        self._producing = False  # the running attempt has tokens
        self._replica_failed = False  # at the end of the last attempt
        self._lost: set[bytes] = set()  # boot ids: a process whose connection breaks twice is one loss
        self._in_doubt = False  # KV blocks of other replicas

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def _output_tokens(self) -> int:
        return len(self._output.output_token_ids)

    def begin(self) -> None:
        """Places the first attempt."""
        self._began = self._timers.now()
        if self._request.deadline_seconds is not None:
            self._cancel_deadline = self._timers.after(self._request.deadline_seconds, self._expire)
        if self._leads or self.prompt.computed:
            self._run_step(self._place)
        else:
            self.prompt.wait(self._begin_after_leader)

    def cancel(self) -> None:
        """The client disconnected: everything at the replicas is freed. No-op when the run has ended."""
        if not self._ended:
            self._close()
            self._release_prompt()

    def _place(self) -> None:
        retry, begun, now = self._retry, self._output_tokens > 0, self._timers.now()
        preferred, self._target = self._target, None
        if preferred is None and not self._leads and self.prompt.replica not in retry.excluded:
            preferred = self.prompt.replica
        try:
            if begun and retry.round_over:
                raise MustWaitError
            placed = self._placement.place(
                self._request,
                self._output_tokens,
                retry.excluded,
                preferred=preferred,
                urgent=retry.urgent(now),
                sources=self._trusts_sources,
            )
            if placed is None:
                self._wait(retry.not_placed(begun, now))
                return
        except MustWaitError:
            self._wait(retry.must_wait(now))
            return
        holder = self._holder(placed.replica)
        if holder is not None:
            placed = placed.fetching_from(holder)
        for listener in self._listeners:
            listener.placed(placed)
        self._submit(placed)

    def _wait(self, seconds: float) -> None:
        self._release_kept()
        self._cancel_next = self._timers.after(seconds, lambda: self._run_step(self._place))

    def _submit(self, placed: Placed[C]) -> None:
        replica, request, source = placed.replica, self._request, placed.source
        submit = Submit(
            request_label=request.label,
            model=request.model,
            revision=request.revision,
            tenant_salt=request.tenant_salt,
            output_token_ids=self._output.output_token_ids,
            sampling=request.sampling,
            priority=request.priority,
            deadline_ms=self._remaining_ms(),
            grammar=request.grammar,
            expected_cached_tokens=placed.expected_tokens,
        )
        if source is not None:
            submit.source.CopyFrom(source.message())
        self.replica, self._source = replica, source
        if self._leads:
            self.prompt.replica = replica
        self._producing = False
        blocks = request.blocks.get(replica.scheme) if replica.scheme is not None else None
        self.attempt = attempt = replica.submit(
            submit, self._take_tokens, self._attempt_ended, placed.expected_tokens, blocks, request.prompt_token_ids
        )
        if source is not None:
            source.expect(attempt.id, len(request.prompt_token_ids) + self._output_tokens, replica)

    @property
    def _trusts_sources(self) -> bool:
        """Whether another replica may compute its prompt: not if one may have caused a loss or a wrong output."""
        return not (self._retry.losses or self._in_doubt or self._scores)

    @property
    def _scores(self) -> bool:
        """Whether the next attempt must compute the whole prompt: its log-probabilities are still missing."""
        return self._request.sampling.HasField("prompt_logprobs") and not self._output_tokens

    def _holder(self, target: ReplicaState[C]) -> KvSource[C] | None:
        """The replica that has the stream's blocks, or those of the prompt's first choice."""
        if self._scores:
            return None
        holder = self._previous
        if holder is None and not self._leads and self.prompt.long:
            holder = self.prompt.replica
        if holder is None or not holder.connected or holder is target or self._in_doubt:
            return None
        return KvSource(holder, cached_only=True)

    def _take_tokens(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], finish: int, error: str
    ) -> None:
        attempt = self.attempt
        assert attempt is not None
        if not self._producing:
            self._start_producing(attempt)
        for listener in self._listeners:
            listener.add_tokens(attempt, token_ids, logprobs, finish, error)
        if self._output.done and not finish:
            attempt.end(Outcome.FINISHED)  # a stop string: the replica would continue

    def _start_producing(self, attempt: Attempt) -> None:
        """The attempt's first tokens: its prompt is computed."""
        assert self.replica is not None
        self._producing = True
        self._retry.progressed()
        self.replica.arriving.discard(attempt.id)
        self._remove_remote_prompt(attempt)
        self._release_kept()
        self._release_prompt()

    def _begin_after_leader(self, failure: Exception | None) -> None:
        if failure is not None:
            self._end(None, failure)
        elif not self._ended:
            self._cancel_next = self._timers.soon(lambda: self._run_step(self._place))

    def _attempt_ended(self, attempt: Attempt) -> None:
        if not self._ended:
            assert self.replica is not None
            boot_id = self.replica.identity.boot_id
            self._replica_failed = not (self.replica.leaving or attempt.skipped or boot_id in self._lost)
            if self._replica_failed and attempt.outcome is Outcome.LOST:
                self._lost.add(boot_id)
            self._cancel_next = self._timers.soon(lambda: self._run_step(lambda: self._handle_end(attempt)))

    def _handle_end(self, attempt: Attempt) -> None:
        """After an attempt's end: the choice is complete, or is placed again and continues after its last token."""
        replica, outcome = self.replica, attempt.outcome
        assert replica is not None and outcome is not None
        self.attempt = None
        self._release_kept()
        self._remove_remote_prompt(attempt)
        self._placement.sweep()
        if attempt.error is not None:
            raise attempt.error
        if self._output.failure is not None:
            raise self._output.failure
        if self._output.done:
            self._end(attempt, None)
            return
        begun = self._output_tokens > 0
        if outcome is Outcome.MOVED:
            self._kept, self._previous, self._target = attempt, replica, attempt.target
            self._retry.moved(replica)
        else:
            self._previous = replica if begun and outcome is Outcome.LOST else None
            if outcome is Outcome.NOT_FINITE:
                self._in_doubt = True
            self._retry.ended(replica, outcome, begun, failed=self._replica_failed)
        for listener in self._listeners:
            listener.left(replica.replica_id, outcome, begun)
        self._place()

    def _expire(self) -> None:
        self._end(None, DeadlineError("The request's deadline passed before the answer was complete."))

    def _run_step(self, step: Callable[[], None]) -> None:
        """Runs a step; an exception ends the run and is not raised to the caller."""
        if self._ended:
            return
        try:
            step()
        except Exception as error:
            self._end(None, error)

    def _end(self, attempt: Attempt | None, failure: Exception | None) -> None:
        if not self._ended:
            if failure is None:
                self._placement.finished(self._request, self._output_tokens)
            self._close()
            for listener in self._listeners:
                listener.ended(attempt, failure)
            self._release_prompt(failure)

    def _release_prompt(self, failure: Exception | None = None) -> None:
        if self._leads:
            self.prompt.release(failure)

    def _close(self) -> None:
        """Releases everything of this run: its attempt, kept blocks and timers."""
        self._ended = True
        for cancel in (self._cancel_next, self._cancel_deadline):
            if cancel is not None:
                cancel()
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            attempt.cancel()
            attempt.release()  # if it was moved just before the client disconnected
            self._remove_remote_prompt(attempt)
        self._release_kept()
        self._placement.sweep()

    def _remove_remote_prompt(self, attempt: Attempt) -> None:
        if self._source is not None:
            self._source.remove(attempt.id)

    def _release_kept(self) -> None:
        if self._kept is not None:
            self._kept.release()
            self._kept = None

    def _remaining_ms(self) -> int:
        """Milliseconds until the deadline; 0 = no deadline."""
        if self._request.deadline_seconds is None:
            return 0
        left = self._request.deadline_seconds - (self._timers.now() - self._began)
        return max(1, int(left * 1000))

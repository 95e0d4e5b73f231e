"""Runs one choice from its first placement to its end, over all of its attempts: pure, driven by calls.

    begin ──▶ place ──▶ running ── tokens ──▶ … ──▶ ended
              ▲   │        │ refused, lost, moved
    timer ────┘   └ none   │
              ▲◀───────────┘

A run never acts inside the call that ends an attempt: `Timers.soon` schedules the rest, so that no placement happens
while a frame is read.

The choices of one prompt are placed together: the first one leads, the others wait until it has computed the prompt,
and run on its replica, or fetch the prompt's KV blocks from there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol

from headrace_proto.replica_pb2 import Source, Submit, TokenLogprobs
from headrace_router.core.attempt import Attempt, Outcome
from headrace_router.core.choice_request import ChoiceRequest
from headrace_router.core.errors import DeadlineError
from headrace_router.core.placement import MustWaitError, Placement
from headrace_router.core.replica_state import C, ReplicaState
from headrace_router.core.retry import SUSPECT_LOSSES, RetryState

TRIAL_TOKENS = 16  # produced alone, until others may run beside a choice that was present at losses
SHARED_TOKENS = 64  # of a prompt at least, for its choices to wait until the first one has computed it


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

    def placed(self, replica_id: str) -> None:
        """An attempt starts on this replica."""

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


@dataclass(frozen=True, slots=True)
class KvSource(Generic[C]):
    """A replica that holds the prompt's KV blocks, or computes them for another one."""

    replica: ReplicaState[C]
    cached_only: bool  # it sends the blocks that it holds, and computes none

    def message(self) -> Source:
        return Source(replica_id=self.replica.replica_id, address=self.replica.address, cached_only=self.cached_only)


class ChoiceRun(Generic[C]):
    """`begin` it once; `cancel` it when the client disconnects. An error of a collaborator becomes its failure."""

    def __init__(
        self,
        request: ChoiceRequest,
        output: ChoiceOutput,
        placement: Placement[C],
        retry: RetryState[ReplicaState[C]],
        timers: Timers,
        listener: RunListener,
        leader: "ChoiceRun[C] | None" = None,
    ) -> None:
        """leader: the run of the prompt's first choice; None = this one."""
        self.attempt: Attempt | None = None  # the running one
        self.replica: ReplicaState[C] | None = None  # that runs it
        self._request = request
        self._output = output
        self._placement = placement
        self._retry = retry
        self._timers = timers
        self._listener = listener
        self._began = 0.0
        self._ended = False
        self._cancel_next: Callable[[], None] | None = None
        self._cancel_deadline: Callable[[], None] | None = None
        self._source: KvSource[C] | None = None  # of the running attempt
        self._previous: ReplicaState[C] | None = None  # the stream's last replica, if it may still have its blocks
        self._kept: Attempt | None = None  # whose blocks stay there until the next attempt has tokens
        self._target: object = None  # the replica that a moved stream was assigned to
        self._leader = leader
        self._followers: list[ChoiceRun[C]] = []  # that wait for this run's first token
        self._prompt_computed = False
        self._producing = False  # the running attempt has tokens
        self._replica_failed = False  # at the end of the last attempt
        # Replicas that failed while it ran there, with their progress at that time.
        self._lost: list[tuple[ReplicaState[C], tuple[bytes, int]]] = []
        self._trial_end: int | None = None  # output tokens after which others may run beside this choice

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
        leader = self._leader
        if leader is not None and not leader._prompt_computed and self._shares_prompt:
            leader._followers.append(self)
        else:
            self._run_step(self._place)

    def cancel(self) -> None:
        """The client disconnected: everything at the replicas is freed. No-op when the run has ended."""
        if not self._ended:
            self._close()

    @property
    def _shares_prompt(self) -> bool:
        return self._leader is not None and len(self._request.prompt_token_ids) >= SHARED_TOKENS

    def _place(self) -> None:
        self._placement.quarantine.check(self._request)
        self._take_back_losses()
        retry, begun = self._retry, self._output_tokens > 0
        preferred, self._target = self._target, None
        if preferred is None and self._leader is not None and not retry.excluded:
            preferred = self._leader.replica
        try:
            if begun and retry.round_over:
                raise MustWaitError
            replica = self._placement.place(
                self._request,
                self._output_tokens,
                retry.excluded,
                preferred=preferred,
                alone=retry.alone,
                urgent=retry.urgent(self._timers.now()),
            )
            if replica is None:
                self._wait(retry.not_placed(begun, self._timers.now()))
                return
        except MustWaitError:
            self._wait(retry.must_wait(self._timers.now()))
            return
        self._listener.placed(replica.replica_id)
        self._submit(replica, self._choose_source(replica))

    def _wait(self, seconds: float) -> None:
        self._release_kept()
        self._cancel_next = self._timers.after(seconds, lambda: self._run_step(self._place))

    def _submit(self, replica: ReplicaState[C], source: KvSource[C] | None) -> None:
        request = self._request
        submit = Submit(
            request_label=request.label,
            model=request.model,
            revision=request.revision,
            tenant_salt=request.tenant_salt,
            prompt_token_ids=request.prompt_token_ids,
            output_token_ids=self._output.output_token_ids,
            sampling=request.sampling,
            priority=request.priority,
            deadline_ms=self._remaining_ms(),
        )
        if source is not None:
            submit.source.CopyFrom(source.message())
        self.replica, self._source = replica, source
        self._producing = False
        self.attempt = attempt = replica.submit(submit, self._take_tokens, self._attempt_ended)
        if self._retry.alone:
            replica.isolated_attempt = attempt.id
            self._trial_end = self._output_tokens + TRIAL_TOKENS
        if source is not None and not source.cached_only:
            source.replica.remote_prompts[attempt.id] = len(request.prompt_token_ids) + self._output_tokens

    def _choose_source(self, target: ReplicaState[C]) -> KvSource[C] | None:
        """The replica that has the stream's blocks, or a prefill replica if it is predicted to be faster."""
        holder = self._previous
        if holder is None and self._shares_prompt and self._leader is not None:
            holder = self._leader.replica
        if holder is not None and holder.connected and holder is not target:
            return KvSource(holder, cached_only=True)
        if self._retry.losses:
            return None  # it may be the cause: no further replica is involved
        source = self._placement.prefill_source(target, self._request, self._output_tokens)
        return KvSource(source, cached_only=False) if source is not None else None

    def _take_tokens(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], finish: int, error: str
    ) -> None:
        attempt = self.attempt
        assert attempt is not None
        if not self._producing:
            self._start_producing(attempt)
        self._listener.add_tokens(attempt, token_ids, logprobs, finish, error)
        if self._output.done and not finish:
            attempt.end(Outcome.FINISHED)  # a stop string: the replica would continue
        if self._trial_end is not None and self._output_tokens >= self._trial_end:
            self._end_trial()

    def _start_producing(self, attempt: Attempt) -> None:
        """The attempt's first tokens: its prompt is computed."""
        assert self.replica is not None
        self._producing = True
        self._retry.progressed()
        self.replica.arriving.discard(attempt.id)
        self._remove_remote_prompt(attempt)
        self._release_kept()
        self._release_followers()

    def _end_trial(self) -> None:
        assert self.replica is not None
        self._trial_end = None
        self._retry.passed_alone()
        self.replica.isolated_attempt = b""

    def _release_followers(self) -> None:
        self._prompt_computed = True
        followers, self._followers = self._followers, []
        for follower in followers:
            follower._begin_after_leader()

    def _begin_after_leader(self) -> None:
        if not self._ended:
            self._cancel_next = self._timers.soon(lambda: self._run_step(self._place))

    def _attempt_ended(self, attempt: Attempt) -> None:
        if not self._ended:
            self._replica_failed = self.replica is not None and not self.replica.leaving and not attempt.skipped
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
        self._trial_end = None
        if outcome is Outcome.MOVED:
            self._kept, self._previous, self._target = attempt, replica, attempt.target
            self._retry.moved(replica)
        else:
            self._previous = replica if begun and outcome is Outcome.LOST else None
            self._count_end(replica, outcome, begun)
        self._listener.left(replica.replica_id, outcome, begun)
        self._place()

    def _count_end(self, replica: ReplicaState[C], outcome: Outcome, begun: bool) -> None:
        """Raises the error that ends the run."""
        self._take_back_losses()
        if outcome is Outcome.LOST and self._replica_failed:
            self._lost.append((replica, replica.progress))
        try:
            self._retry.ended(replica, outcome, begun, failed=self._replica_failed)
        finally:
            if outcome is Outcome.LOST and self._retry.losses > SUSPECT_LOSSES:
                self._placement.quarantine.add(self._request)

    def _take_back_losses(self) -> None:
        """A process that was paused, overloaded or cut off, and makes steps again, was not killed by this choice."""
        for loss in list(self._lost):
            replica, progress = loss
            if replica.has_stepped_since(progress):
                self._lost.remove(loss)
                self._retry.returned()

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
            followers = self._followers
            if failure is not None:
                self._followers = []
            self._close()
            self._listener.ended(attempt, failure)
            if failure is not None:
                for follower in followers:
                    follower._end(None, failure)

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
        self._release_followers()
        self._placement.sweep()

    def _remove_remote_prompt(self, attempt: Attempt) -> None:
        """The prompt is computed, or not needed any more."""
        if self._source is not None:
            self._source.replica.remote_prompts.pop(attempt.id, None)

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

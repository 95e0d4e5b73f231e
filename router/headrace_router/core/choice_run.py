"""Runs one choice from its first placement to its end, over all of its attempts: pure, driven by calls.

    begin ──▶ place ──▶ running ── tokens ──▶ … ──▶ ended
              ▲   │        │ refused, lost, moved
    timer ────┘   └ none   │
              ▲◀───────────┘

A run never acts inside the call that ends an attempt: `Timers.soon` schedules the rest, so that no placement happens
while a frame is read.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from headrace_proto.replica_pb2 import Sampling, Source, Submit, TokenLogprobs
from headrace_router.core.attempt import Attempt, OnTokens, Outcome
from headrace_router.core.errors import DeadlineError
from headrace_router.core.policy.interface import Work
from headrace_router.core.retry import RetryState

RETRY_SECONDS = 0.1  # between two searches for a ready replica


class Replica(Protocol):
    """The replica interface that a run needs."""

    @property
    def replica_id(self) -> str: ...

    @property
    def address(self) -> str: ...

    @property
    def connected(self) -> bool: ...

    def submit(self, submit: Submit, on_tokens: OnTokens, on_end: Callable[[Attempt], None]) -> Attempt:
        """Starts an attempt under a new id. It may end at once."""

    def add_remote_prompt(self, attempt_id: bytes, tokens: int) -> None:
        """Another replica will fetch a prompt of `tokens` tokens from this one."""

    def remove_remote_prompt(self, attempt_id: bytes) -> None:
        """That prompt is computed, or not needed any more. No-op when it is unknown."""


R = TypeVar("R", bound=Replica)


class Placement(Protocol[R]):
    """Chooses replicas for a request of one model and revision."""

    def place(self, work: Work, excluded: Sequence[R]) -> R | None:
        """A ready replica that is not excluded, or None."""

    def prefill_source(self, target: R, work: Work) -> R | None:
        """The prefill replica that should compute the prompt for `target`; None when the target should."""

    def sweep(self) -> None:
        """Called after each attempt: an idle link to a replica that is no longer a member can be closed."""


class Output(Protocol):
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


class Timer(Protocol):
    """A scheduled call."""

    def cancel(self) -> None: ...


class Timers(Protocol):
    """The clock and timers of a run. Seconds on one monotonic clock."""

    def now(self) -> float: ...

    def soon(self, call: Callable[[], None]) -> Timer:
        """Calls after the current call has returned."""

    def after(self, seconds: float, call: Callable[[], None]) -> Timer: ...


@dataclass(frozen=True, slots=True)
class RunRequest:
    """The request, the same for every attempt. `label` is for logs (R12). deadline_seconds: since `begin`."""

    label: str
    model: str
    revision: str
    tenant_salt: bytes
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    priority: int = 0
    deadline_seconds: float | None = None


@dataclass(frozen=True, slots=True)
class KvSource(Generic[R]):
    """A replica that holds the prompt's KV blocks, or computes them for another one."""

    replica: R
    computes: bool

    def message(self) -> Source:
        return Source(replica_id=self.replica.replica_id, address=self.replica.address, cached_only=not self.computes)


class ChoiceRun(Generic[R]):
    """`begin` it once; `cancel` it when the client disconnects. An error of a collaborator becomes its failure."""

    def __init__(
        self,
        request: RunRequest,
        output: Output,
        placement: Placement[R],
        retry: RetryState[R],
        timers: Timers,
        listener: RunListener,
    ) -> None:
        self.attempt: Attempt | None = None  # the running one
        self.replica: R | None = None  # that runs it
        self._request = request
        self._output = output
        self._placement = placement
        self._retry = retry
        self._timers = timers
        self._listener = listener
        self._began = 0.0
        self._ended = False
        self._next: Timer | None = None
        self._deadline: Timer | None = None
        self._source: KvSource[R] | None = None  # of the running attempt
        self._previous: R | None = None  # the stream's last replica, if it may still have its blocks
        self._kept: Attempt | None = None  # whose blocks stay there until the next attempt has tokens

    @property
    def ended(self) -> bool:
        return self._ended

    def begin(self) -> None:
        """Places the first attempt."""
        self._began = self._timers.now()
        if self._request.deadline_seconds is not None:
            self._deadline = self._timers.after(self._request.deadline_seconds, self._expire)
        self._run_step(self._place)

    def cancel(self) -> None:
        """The client disconnected: everything at the replicas is freed. No-op when the run has ended."""
        if not self._ended:
            self._close()

    def _place(self) -> None:
        work = self._work()
        replica = self._placement.place(work, self._retry.excluded)
        if replica is None:
            self._release_kept()
            self._retry.not_placed(bool(self._output.output_token_ids), self._timers.now())
            self._next = self._timers.after(RETRY_SECONDS, lambda: self._run_step(self._place))
            return
        self._retry.placed()
        self._listener.placed(replica.replica_id)
        self._submit(replica, self._choose_source(replica, work))

    def _submit(self, replica: R, source: KvSource[R] | None) -> None:
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
        self.attempt = attempt = replica.submit(submit, self._take_tokens, self._attempt_ended)
        if source is not None and source.computes:
            source.replica.add_remote_prompt(attempt.id, len(submit.prompt_token_ids) + len(submit.output_token_ids))

    def _choose_source(self, target: R, work: Work) -> KvSource[R] | None:
        """The stream's last replica, or a prefill replica if it is predicted to be faster."""
        previous = self._previous
        if previous is not None and previous.connected and previous is not target:
            return KvSource(previous, computes=False)
        source = self._placement.prefill_source(target, work)
        return KvSource(source, computes=True) if source is not None else None

    def _take_tokens(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], finish: int, error: str
    ) -> None:
        attempt = self.attempt
        assert attempt is not None
        self._remove_remote_prompt(attempt)
        self._release_kept()
        self._listener.add_tokens(attempt, token_ids, logprobs, finish, error)
        if self._output.done and not finish:
            attempt.end(Outcome.FINISHED)  # a stop string: the replica would continue

    def _attempt_ended(self, attempt: Attempt) -> None:
        if not self._ended:
            self._next = self._timers.soon(lambda: self._run_step(lambda: self._handle_end(attempt)))

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
        begun = bool(self._output.output_token_ids)
        if outcome is Outcome.MOVED:
            self._kept, self._previous = attempt, replica
            self._retry.moved(replica)
        else:
            self._previous = replica if begun and outcome is Outcome.LOST else None
            self._retry.ended(replica, outcome, begun)
        self._listener.left(replica.replica_id, outcome, begun)
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
            self._close()
            self._listener.ended(attempt, failure)

    def _close(self) -> None:
        """Releases everything of this run: its attempt, kept blocks and timers."""
        self._ended = True
        for timer in (self._next, self._deadline):
            if timer is not None:
                timer.cancel()
        attempt, self.attempt = self.attempt, None
        if attempt is not None:
            attempt.cancel()
            attempt.release()  # if it was moved just before the client disconnected
            self._remove_remote_prompt(attempt)
        self._release_kept()
        self._placement.sweep()

    def _remove_remote_prompt(self, attempt: Attempt) -> None:
        if self._source is not None:
            self._source.replica.remove_remote_prompt(attempt.id)

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

    def _work(self) -> Work:
        return Work(
            prompt_token_ids=self._request.prompt_token_ids,
            output_tokens_so_far=len(self._output.output_token_ids),
            tenant_salt=self._request.tenant_salt,
            max_tokens=self._request.sampling.max_tokens,
        )

"""One attempt to generate one choice on one replica: pure, driven by the replica's deltas.

Messages that wait to be sent to a replica, and those that it has not reported yet: pure.

A prompt is copied into its message when that is sent: of a request with many choices the queue holds one copy.
"""

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum

from headrace_proto.replica_pb2 import (
    FINISH_CANCELLED,
    FINISH_NONE,
    FINISH_REFUSED,
    AttemptTimes,
    Cancel,
    Delta,
    RouterFrame,
    Submit,
    TokenLogprobs,
)

MAX_FRAME_TOKENS = 256 << 10  # prompt tokens in one RouterFrame: about 1 MiB


class SubmitQueue:
    """Submits and cancels of one replica until its stream sends them; within a frame, cancels come first."""

    def __init__(self, on_put: Callable[[], None]) -> None:
        """`on_put` is called after a message was added."""
        self._submits: list[tuple[Submit, Sequence[int]]] = []  # with the tokens of the prompt that are not in it
        self._cancels: list[bytes] = []
        self._sent: deque[bytes] = deque()  # attempts of this stream that the replica has not reported
        self._reported = 0  # submits of this stream
        self._on_put = on_put

    def submit(self, submit: Submit, prompt: Sequence[int] = ()) -> None:
        """prompt: token ids to add to it before it is sent."""
        self._submits.append((submit, prompt))
        self._on_put()

    def cancel(self, attempt_id: bytes) -> None:
        """Cancels an attempt; a submit that is still queued is dropped."""
        kept = [entry for entry in self._submits if entry[0].attempt_id != attempt_id]
        if len(kept) < len(self._submits):
            self._submits = kept
            return
        self._cancels.append(attempt_id)
        self._on_put()

    def clear(self) -> None:
        """Drops everything: the stream has ended."""
        self._submits.clear()
        self._cancels.clear()
        self._sent.clear()
        self._reported = 0

    def take(self) -> RouterFrame | None:
        """The queued messages as one frame, up to about 1 MiB of prompts; None when there are none."""
        if not (self._submits or self._cancels):
            return None
        submits = self._take_submits()
        cancels, self._cancels = self._cancels, []
        self._sent.extend(submit.attempt_id for submit in submits)
        sent = [Cancel(attempt_id=attempt_id) for attempt_id in cancels]
        return RouterFrame(submits=submits, cancels=sent)

    def _take_submits(self) -> list[Submit]:
        """All, or the oldest and then the shortest ones: none waits for all of another request's choices."""
        lengths = [_length(*entry) for entry in self._submits]
        places = range(len(lengths))
        order: Sequence[int] = places
        if sum(lengths) > MAX_FRAME_TOKENS:
            order = [0, *sorted(places[1:], key=lengths.__getitem__)]
        tokens, taken = 0, list[int]()
        for place in order:
            if taken and tokens + lengths[place] > MAX_FRAME_TOKENS:
                break
            tokens += lengths[place]
            taken.append(place)
        submits = []
        for place in taken:
            submit, prompt = self._submits[place]
            submit.prompt_token_ids.extend(prompt)
            submits.append(submit)
        chosen = set(taken)
        self._submits = [entry for place, entry in enumerate(self._submits) if place not in chosen]
        return submits

    def take_reported(self, count: int) -> list[bytes]:
        """The attempts that are new among the first `count` submits of this stream, which the replica has by now."""
        reported = []
        while self._reported < count and self._sent:
            reported.append(self._sent.popleft())
            self._reported += 1
        return reported


def _length(submit: Submit, prompt: Sequence[int]) -> int:
    return len(submit.prompt_token_ids) + len(submit.output_token_ids) + len(prompt)


# (new token ids, their logprobs or nothing, finish reason or FINISH_NONE, sentence of an error)
OnTokens = Callable[[Sequence[int], Sequence[TokenLogprobs], int, str], None]


class Outcome(Enum):
    """How an attempt ended, from the router's side."""

    FINISHED = "finished"  # by the replica, or by a stop string
    REFUSED = "refused"  # not accepted: may be placed elsewhere
    LOST = "lost"  # the stream broke, the replica cancelled the attempt, or its tokens were not as requested
    MOVED = "moved"  # by this router, to another replica
    CANCELLED = "cancelled"  # by this router: no client reads the answer
    NOT_FINITE = "not_finite"  # the model's output was not finite there: may be placed elsewhere
    FAILED = "failed"  # processing its tokens raised; see `error`


class Attempt:
    """Receives the deltas of one attempt id in order, drops repeats, and refuses gaps and more tokens than requested.

    `on_tokens` is called while the frame is read; `on_end` once, when `outcome` is set; `on_cancel` with the
    attempt's id when the replica must end it.
    """

    def __init__(
        self,
        attempt_id: bytes,
        first_index: int,
        on_tokens: OnTokens,
        on_end: "Callable[[Attempt], None]",
        on_cancel: Callable[[bytes], None],
        max_tokens: int = 0,
    ):
        """max_tokens: of the answer, `first_index` tokens of earlier attempts included; 0 = no bound."""
        self.id = attempt_id
        self.cached_tokens = 0  # prompt tokens found in a cache; in the first delta, like `queue_seconds`
        self.queue_seconds: float | None = None  # None = no delta yet
        self.prompt_logprobs: Sequence[TokenLogprobs] = ()  # in the first delta
        self.preemptions = 0
        self.times: AttemptTimes | None = None  # from the newest delta with times
        self.refusal = ""
        self.outcome: Outcome | None = None
        self.error: Exception | None = None
        self.skipped = False  # the replica skipped tokens, or sent more than were requested
        self.target: object = None  # the replica that it was moved to; None = any
        self._first_index = self._next_index = first_index
        self._max_tokens = max_tokens
        self._on_tokens = on_tokens
        self._on_end = on_end
        self._on_cancel = on_cancel
        self._kept = False

    @property
    def open(self) -> bool:
        return self.outcome is None

    @property
    def started(self) -> bool:
        """Whether this attempt has produced tokens."""
        return self._next_index > self._first_index

    def receive(self, delta: Delta) -> None:
        """Processes one delta of the replica. Never raises: an error of `on_tokens` ends the attempt."""
        if not self.open:
            return
        if self.queue_seconds is None:
            self.cached_tokens, self.queue_seconds = delta.cached_tokens, delta.queue_us / 1e6
            self.prompt_logprobs = delta.prompt_logprobs
        self.preemptions = delta.preemptions
        if delta.HasField("times"):
            self.times = AttemptTimes()
            self.times.CopyFrom(delta.times)  # a reference would keep the whole frame
        if delta.finish == FINISH_REFUSED:
            self.refusal = delta.error
            self._set(Outcome.REFUSED)
            return
        known = self._next_index - delta.first_index
        if known < 0 or 0 < self._max_tokens < delta.first_index + len(delta.token_ids):
            self.skipped = True
            self.end(Outcome.LOST)
            return
        token_ids = delta.token_ids[known:]
        self._next_index += len(token_ids)
        # An attempt that is still open was not cancelled by this router: the replica is stopping and cancelled it.
        cancelled = delta.finish == FINISH_CANCELLED
        finish = FINISH_NONE if cancelled or delta.not_finite else delta.finish
        try:
            if token_ids or finish != FINISH_NONE:
                logprobs = delta.logprobs
                self._on_tokens(token_ids, logprobs[known:] if logprobs else (), finish, delta.error)
        except Exception as error:
            self.error = error
            self.end(Outcome.FAILED)
            return
        if cancelled:
            self.end(Outcome.LOST)
        elif delta.not_finite and self.open:
            self._set(Outcome.NOT_FINITE)
        elif finish != FINISH_NONE and self.open:
            self._set(Outcome.FINISHED)

    def end(self, outcome: Outcome) -> None:
        """Ends it for a reason outside of its deltas, and cancels it at the replica. No-op when it has ended."""
        if self.open:
            self._on_cancel(self.id)
            self._set(outcome)

    def move(self, target: object = None) -> None:
        """It continues on another replica: later deltas are dropped. This replica keeps its blocks until `release`.

        target: that replica; None = chosen like that of a new request.
        """
        if self.open:
            self._kept, self.target = True, target
            self._set(Outcome.MOVED)

    def release(self) -> None:
        """After `move`: the replica may free its blocks. Idempotent."""
        if self._kept:
            self._kept = False
            self._on_cancel(self.id)

    def cancel(self) -> None:
        """The client disconnected: everything at the replica is freed. No-op when it has ended."""
        self.end(Outcome.CANCELLED)

    def _set(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self._on_end(self)

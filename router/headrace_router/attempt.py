"""One try of one choice on one replica."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from headrace_proto.replica_pb2 import (
    FINISH_CANCELLED,
    FINISH_NONE,
    FINISH_REFUSED,
    Delta,
    TokenLogprobs,
)

# (new token ids, their logprobs or nothing, finish reason or FINISH_NONE, sentence of an error)
OnTokens = Callable[[Sequence[int], Sequence[TokenLogprobs], int, str], None]


class Outcome(Enum):
    """How an attempt ended, seen from the router."""

    FINISHED = "finished"  # the replica said so, in whatever way
    REFUSED = "refused"  # not accepted: may be placed elsewhere
    LOST = "lost"  # the stream broke, the replica gave the attempt up, or it skipped tokens
    MOVED = "moved"  # by this router: it runs better elsewhere


@dataclass(slots=True)
class FirstDelta:
    """What the replica tells once per attempt."""

    cached_tokens: int
    queue_seconds: float


class Attempt:
    """Receives the deltas of one attempt id in order, dropping repeats and refusing gaps.

    Tokens are handed on by a plain call, inside the reading of the frame: one wake-up per request and step less.
    """

    def __init__(self, attempt_id: bytes, first_index: int, on_tokens: OnTokens, on_cancel: Callable[[bytes], None]):
        self.id = attempt_id
        self.first: FirstDelta | None = None
        self.preemptions = 0
        self.refusal = ""
        self.outcome: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._first_index = self._next_index = first_index
        self._on_tokens = on_tokens
        self._on_cancel = on_cancel
        self._kept = False

    @property
    def open(self) -> bool:
        return not self.outcome.done()

    @property
    def started(self) -> bool:
        """Whether this attempt has given tokens."""
        return self._next_index > self._first_index

    def receive(self, delta: Delta) -> None:
        """One delta of the replica. Never raises: a failure of the receiver becomes the attempt's outcome."""
        if not self.open:
            return
        if self.first is None:
            self.first = FirstDelta(delta.cached_tokens, delta.queue_us / 1e6)
        self.preemptions = delta.preemptions
        if delta.finish == FINISH_REFUSED:
            self.refusal = delta.error
            self.outcome.set_result(Outcome.REFUSED)
            return
        known = self._next_index - delta.first_index
        if known < 0:
            self.end(Outcome.LOST)
            return
        token_ids = delta.token_ids[known:]
        self._next_index += len(token_ids)
        # An attempt that is still open was not cancelled from here: the replica is stopping and gave it up.
        given_up = delta.finish == FINISH_CANCELLED
        finish = FINISH_NONE if given_up else delta.finish
        try:
            if token_ids or finish != FINISH_NONE:
                self._on_tokens(token_ids, delta.logprobs[known:], finish, delta.error)
        except Exception as error:
            self._on_cancel(self.id)
            self.outcome.set_exception(error)
            return
        if given_up:
            self.end(Outcome.LOST)
        elif finish != FINISH_NONE and self.open:
            self.outcome.set_result(Outcome.FINISHED)

    def end(self, outcome: Outcome) -> None:
        """The attempt is over for a reason outside of its deltas. A skipped token also cancels it."""
        if self.open:
            self._on_cancel(self.id)
            self.outcome.set_result(outcome)

    def move(self) -> None:
        """It goes on elsewhere: what still comes is dropped. The replica keeps its blocks until `release`."""
        if self.open:
            self._kept = True
            self.outcome.set_result(Outcome.MOVED)

    def release(self) -> None:
        """After `move`: the replica may end it. Idempotent."""
        if self._kept:
            self._kept = False
            self._on_cancel(self.id)

    def cancel(self) -> None:
        """Nobody wants the answer any more: frees everything at the replica. Harmless when it is over."""
        if self.open:
            self._on_cancel(self.id)
            self.outcome.cancel()

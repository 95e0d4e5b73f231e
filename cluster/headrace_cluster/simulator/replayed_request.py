"""One client: it takes the tokens of its answer, and records their times."""

from collections.abc import Callable, Sequence
from typing import Any

from headrace_cluster.simulator.trace import TraceRequest
from headrace_cluster.simulator.virtual_time import VirtualTime
from headrace_proto.replica_pb2 import FINISH_NONE, TokenLogprobs
from headrace_router.core.account import Cause, Recorder, TimeAccount
from headrace_router.core.attempt import Attempt, Outcome
from headrace_router.core.placement import Placed


class ReplayedRequest:
    """The output of its choice run, and a listener beside `recorder`, which writes its account."""

    def __init__(self, time: VirtualTime, traced: TraceRequest, ended: Callable[["ReplayedRequest"], None]) -> None:
        """ended: called once, when the answer is complete or has failed."""
        self.traced = traced
        self.began = time.now
        self.first_token: float | None = None  # seconds of virtual time
        self.last_token = 0.0
        self.cached_tokens = 0
        self.replica = ""  # the first one
        self.placements = 0
        self.fetched = False  # it was to fetch a prefix that another replica has cached
        self.prefilled = False  # a prefill replica was to compute its prompt for another one
        self.predicted: float | None = None  # seconds until the first token, by the policy
        self.failure: Exception | None = None
        self.account = TimeAccount("", time.now)
        self.account.enter(Cause.PLACEMENT, time.now)
        self.recorder = Recorder(self.account, lambda: time.now)
        self._time = time
        self._ended = ended
        self._tokens: list[int] = []
        self._finished = False

    @property
    def ttft(self) -> float | None:
        """Seconds until the first token; None if there was none."""
        return self.first_token - self.began if self.first_token is not None else None

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first one; None for shorter answers."""
        if self.first_token is None or len(self._tokens) < 2:
            return None
        return (self.last_token - self.first_token) / (len(self._tokens) - 1)

    # Output

    @property
    def output_token_ids(self) -> Sequence[int]:
        return self._tokens

    @property
    def done(self) -> bool:
        return self._finished

    # RunListener

    def placed(self, placed: Placed[Any]) -> None:
        if not self.placements and placed.prediction is not None:
            self.predicted = placed.prediction.first_token
        self.replica = self.replica or placed.replica.replica_id
        self.placements += 1
        if placed.source is not None:
            self.fetched = self.fetched or placed.source.cached_only
            self.prefilled = self.prefilled or not placed.source.cached_only

    def add_tokens(
        self, attempt: Attempt, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], finish: int, error: str
    ) -> None:
        if token_ids and self.first_token is None:
            self.first_token = self._time.now
            self.cached_tokens = attempt.cached_tokens
        if token_ids:
            self.last_token = self._time.now
        self._tokens += token_ids
        self._finished = finish != FINISH_NONE

    def left(self, replica_id: str, outcome: Outcome, begun: bool) -> None:
        """The next placement is counted when it is made."""

    def ended(self, attempt: Attempt | None, failure: Exception | None) -> None:
        self.failure = failure
        self.account.enter(Cause.CLIENT, self._time.now)
        self._ended(self)

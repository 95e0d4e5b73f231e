"""What the run of a choice needs of its owner: the output, a listener and timers."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from headrace_proto.replica_pb2 import TokenLogprobs
from headrace_router.core.attempt import Attempt, Outcome
from headrace_router.core.placement import Placed


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

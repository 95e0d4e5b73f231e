"""Where a choice may run next when its replica refuses or is lost: pure, time and randomness are passed in.

refused before the first token: another replica at once, `max_attempts` in all; no replica left → an error
lost:                    another replica, `migration_limit` times, before the first token and after it; the next
                         loss → an error. A process whose connection breaks twice is one loss
after the first token:   the stream moves; refused or none ready → it waits. Without a new token it ends after
                         `patience` seconds or MAX_REFUSALS refusals
not finite:              another replica, or the same one if there is no other; the second time → an error
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from headrace_base.errors import counted
from headrace_router.core.attempt import Outcome
from headrace_router.core.errors import (
    ApiError,
    GenerationFailedError,
    NoReplicaError,
    OverloadedError,
    ReplicaLostError,
    ReplicasLostError,
)

Replica = TypeVar("Replica")

RETRY_SECONDS = 0.1  # mean time between two searches for a ready replica; the first pause after refusals
LONGEST_PAUSE = 2.0  # seconds; each pause after refusals is twice the one before
MAX_NOT_FINITE = 2  # attempts of a choice
MAX_REFUSALS = 100  # refusals of a stream, without a new token
MAX_MOVES = 16  # moves of a stream whose replicas ended in order


@dataclass(slots=True)
class RetryState(Generic[Replica]):
    """Counts one choice's attempts. A `Replica` is any type of the caller's; values are only compared."""

    model: str
    max_attempts: int
    migration_limit: int
    patience: float  # seconds
    jitter: Callable[[], float] = lambda: 0.5  # uniform in [0, 1): spreads the retries of many choices
    excluded: list[Replica] = field(default_factory=list)
    losses: int = 0  # replicas that failed while the choice ran there
    _tries: int = 0
    _refusals: int = 0
    _refused_in_round: int = 0  # since the last pause
    _refused_in_vain: int = 0  # since the last new token
    _pauses: int = 0
    _waiting_since: float | None = None
    _not_finite: int = 0  # attempts
    _moves: int = 0  # moves of a stream whose replica was lost, in order or not

    @property
    def round_over(self) -> bool:
        """Whether enough replicas have refused a stream: it pauses before the next one is tried."""
        return self._refused_in_round >= self.max_attempts

    def urgent(self, now: float) -> bool:
        """Whether half of the patience is over."""
        return self._waiting_since is not None and now - self._waiting_since >= self.patience / 2

    def progressed(self) -> None:
        """The running attempt has produced tokens."""
        self._end_wait()

    def ended(self, replica: Replica, outcome: Outcome, begun: bool, *, failed: bool) -> None:
        """An attempt was refused or lost. Raises the ApiError that ends the choice.

        begun: tokens were sent. failed: the replica itself failed; it was not on its way out.
        """
        self._refusals += outcome is Outcome.REFUSED
        if outcome is Outcome.NOT_FINITE:
            self._add_not_finite(replica)
            return
        if outcome is Outcome.LOST:
            self._add_loss(failed)
            if begun:
                self._moves += 1
                if self._moves > MAX_MOVES:
                    raise ReplicaLostError(
                        f"The replica of this request ended {MAX_MOVES} times; send the request again."
                    )
                self.excluded = [replica]
                self._end_wait()
                return
        self.excluded.append(replica)
        self._tries += 1
        if begun:
            self._refused_in_round += 1
            self._refused_in_vain += 1
            if self._refused_in_vain >= MAX_REFUSALS:
                raise OverloadedError(
                    f"The replica of this request was lost, and the others refused it {MAX_REFUSALS} times; send the "
                    "request again."
                )
        elif self._tries >= self.max_attempts:
            raise self._none_left()

    def _add_loss(self, failed: bool) -> None:
        self.losses += failed
        if self.losses > max(self.migration_limit, 1):
            raise ReplicasLostError(
                f"{counted(self.losses, 'replica')} were lost while this request ran, so it is not run again; change "
                "it, or report it to the operator of this server."
            )
        if self.losses > self.migration_limit:
            raise ReplicaLostError("The replica was lost while this request ran; send the request again.")

    def _add_not_finite(self, replica: Replica) -> None:
        self._not_finite += 1
        if self._not_finite >= MAX_NOT_FINITE:
            raise GenerationFailedError(
                f"The model computed values that are not finite for this request, {MAX_NOT_FINITE} times; change the "
                "prompt, or ask the operator for another --dtype."
            )
        self.excluded = [replica]
        self._end_wait()

    def moved(self, replica: Replica) -> None:
        """The router itself moved the stream: no replica failed."""
        self.excluded = [replica]
        self._end_wait()

    def not_placed(self, begun: bool, now: float) -> float:
        """No replica can be chosen now. Returns the seconds until the next search; raises the ApiError that ends it."""
        if not begun and not self._not_finite:
            raise self._none_left()
        self.excluded.clear()  # one that refused may have capacity by now
        return self._pause(now, refused=self._refused_in_round > 0)

    def must_wait(self, now: float) -> float:
        """Replicas are ready, but may not be used yet. Returns and raises like `not_placed`."""
        return self._pause(now, refused=True)

    def _pause(self, now: float, *, refused: bool) -> float:
        if self._waiting_since is None:
            self._waiting_since = now
        elif now - self._waiting_since >= self.patience:
            raise self._waited_too_long()
        pause = RETRY_SECONDS
        if refused:
            pause = min(RETRY_SECONDS * 2**self._pauses, LONGEST_PAUSE)
            self._pauses = min(self._pauses + 1, 10)
        self._refused_in_round = 0
        return pause * (0.5 + self.jitter())

    def _end_wait(self) -> None:
        self._waiting_since = None
        self._refused_in_round = self._refused_in_vain = self._pauses = 0

    def _waited_too_long(self) -> ApiError:
        seconds = f"{self.patience:.0f} s"
        if not self._moves:
            return self._none_left()
        if self._refused_in_vain:
            return OverloadedError(
                f"The replica of this request was lost, and the others were full for {seconds}; send the request again."
            )
        return ReplicaLostError(
            f"The replica of this request was lost, and none was ready within {seconds}; send the request again."
        )

    def _none_left(self) -> ApiError:
        if self._refusals:
            return OverloadedError("All replicas of this model are full; try again in a moment.")
        if self.excluded:
            return ReplicaLostError("The replica was lost before it answered, and no other one is ready.")
        return NoReplicaError(f"No replica of '{self.model}' is ready; try again in a moment.")

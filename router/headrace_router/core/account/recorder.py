"""Writes what the run of a choice reports into the account of its request. Pure: times are passed in."""

from typing import Any

from headrace_router.core.account.time_account import TimeAccount
from headrace_router.core.attempt import Attempt
from headrace_router.core.placement import Placed
from headrace_router.core.replica_state import ReplicaState


class Recorder:
    """Of one choice."""

    def __init__(self, account: TimeAccount) -> None:
        self.account = account
        self._replica: ReplicaState[Any] | None = None
        self._started = False  # the attempt has sent tokens

    def placed(self, placed: Placed[Any], now: float) -> None:
        """An attempt begins."""
        self._replica, self._started = placed.replica, False
        self.account.placed(placed.decision, now)

    def tokens(self, attempt: Attempt, now: float) -> None:
        """The attempt has sent tokens."""
        if not self._started:
            self._started = True
            queued = attempt.queue_seconds or 0.0
            self.account.tokens(now, queued=queued, times=attempt.times, slowness=self._slowness)

    def left(self, now: float) -> None:
        """The attempt was refused, lost or moved."""
        self.account.left(now)

    def ended(self, attempt: Attempt | None, now: float) -> None:
        """The choice is complete, or failed."""
        times, preemptions = (attempt.times, attempt.preemptions) if attempt is not None else (None, 0)
        self.account.answered(now, times=times, slowness=self._slowness, preemptions=preemptions)

    @property
    def _slowness(self) -> float:
        """How many times as long as its peers' the replica's steps take."""
        return self._replica.speed.slowness if self._replica is not None else 1.0

"""Where a choice may go next when its replica refuses, dies or gives it up: pure, time is passed in.

nothing out yet:   another replica at once, `max_attempts` in all; nobody left → an error
tokens are out:    the stream moves, `migration_limit` times; nobody ready → wait, up to `patience` seconds, as the
                   controller replaces what died
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Generic, TypeVar

from headrace_router.errors import ApiError, NoReplicaError, OverloadedError, ReplicaLostError

Place = TypeVar("Place")


class Loss(Enum):
    """How an attempt ended that did not end the choice."""

    REFUSED = "refused"
    LOST = "lost"


@dataclass(slots=True)
class Journey(Generic[Place]):
    """One choice's way through the replicas. A `Place` is whatever the caller calls a replica."""

    model: str
    max_attempts: int
    migration_limit: int
    patience: float
    excluded: list[Place] = field(default_factory=list)
    migrations: int = 0
    _tries: int = 0
    _refusals: int = 0
    _waiting_since: float | None = None

    def placed(self) -> None:
        """A replica was found."""
        self._waiting_since = None

    def ended(self, place: Place, loss: Loss, begun: bool) -> None:
        """An attempt is over before the choice is. `begun`: tokens are out. Raises the ApiError when that was it."""
        self._refusals += loss is Loss.REFUSED
        if begun and loss is Loss.LOST:
            self.migrations += 1
            if self.migrations > self.migration_limit:
                raise ReplicaLostError(
                    f"{self.migrations} replicas were lost while they answered; send the request again."
                )
            self.excluded = [place]
            return
        self.excluded.append(place)
        self._tries += 1
        if not begun and self._tries >= self.max_attempts:
            raise self._nobody()

    def moved(self, place: Place) -> None:
        """The router itself has called the attempt off, to go on elsewhere: nobody failed."""
        self.excluded = [place]

    def nowhere(self, begun: bool, now: float) -> None:
        """No replica can be chosen now: the caller waits a little and asks again. Raises the ApiError to give up."""
        if not begun:
            raise self._nobody()
        self.excluded.clear()  # whoever refused may have room by now
        if self._waiting_since is None:
            self._waiting_since = now
        elif now - self._waiting_since >= self.patience:
            raise ReplicaLostError(
                f"The replica that was answering is gone, and none was ready within {self.patience:.0f} s; send the "
                "request again."
            )

    def _nobody(self) -> ApiError:
        if self._refusals:
            return OverloadedError("All replicas of this model are full; try again in a moment.")
        if self.excluded:
            return ReplicaLostError("The replica was lost before it answered, and no other one is ready.")
        return NoReplicaError(f"No replica of '{self.model}' is ready; try again in a moment.")

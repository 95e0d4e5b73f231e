"""Where a choice may run next when its replica refuses or is lost: pure, time is passed in.

before the first token:  another replica at once, `max_attempts` in all; no replica left → an error
after it:                the stream moves, `migration_limit` times; none ready → wait, up to `patience` seconds, while
                         the controller replaces the lost replica
"""

from dataclasses import dataclass, field
from typing import Generic, TypeVar

from headrace_proto.quantities import counted
from headrace_router.core.attempt import Outcome
from headrace_router.core.errors import ApiError, NoReplicaError, OverloadedError, ReplicaLostError

Replica = TypeVar("Replica")


@dataclass(slots=True)
class RetryState(Generic[Replica]):
    """Counts one choice's attempts. A `Replica` is any type of the caller's; values are only compared."""

    model: str
    max_attempts: int
    migration_limit: int
    patience: float  # seconds
    excluded: list[Replica] = field(default_factory=list)
    migrations: int = 0
    _tries: int = 0
    _refusals: int = 0
    _waiting_since: float | None = None

    def placed(self) -> None:
        """A replica was found."""
        self._waiting_since = None

    def ended(self, replica: Replica, outcome: Outcome, begun: bool) -> None:
        """An attempt was refused or lost. `begun`: tokens were sent. Raises the ApiError that ends the choice."""
        self._refusals += outcome is Outcome.REFUSED
        if begun and outcome is Outcome.LOST:
            self.migrations += 1
            if self.migrations > self.migration_limit:
                lost = f"{counted(self.migrations, 'replica')} {'was' if self.migrations == 1 else 'were'} lost"
                raise ReplicaLostError(f"{lost} while this request ran; send the request again.")
            self.excluded = [replica]
            return
        self.excluded.append(replica)
        self._tries += 1
        if not begun and self._tries >= self.max_attempts:
            raise self._none_left()

    def moved(self, replica: Replica) -> None:
        """The router itself moved the stream: no replica failed."""
        self.excluded = [replica]

    def not_placed(self, begun: bool, now: float) -> None:
        """No replica can be chosen now: the caller waits and retries. Raises the ApiError that ends the choice."""
        if not begun:
            raise self._none_left()
        self.excluded.clear()  # one that refused may have capacity by now
        if self._waiting_since is None:
            self._waiting_since = now
        elif now - self._waiting_since >= self.patience:
            raise ReplicaLostError(
                f"The replica of this request was lost, and none was ready within {self.patience:.0f} s; send the "
                "request again."
            )

    def _none_left(self) -> ApiError:
        if self._refusals:
            return OverloadedError("All replicas of this model are full; try again in a moment.")
        if self.excluded:
            return ReplicaLostError("The replica was lost before it answered, and no other one is ready.")
        return NoReplicaError(f"No replica of '{self.model}' is ready; try again in a moment.")

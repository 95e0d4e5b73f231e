"""The prompt of several choices: the first one computes it, the others run on its replica or fetch from there."""

from collections.abc import Callable
from typing import Generic

from headrace_router.core.replica_state import C, ReplicaState

SHARED_TOKENS = 64  # of a prompt at least, for its choices to wait until the first one has computed it


class SharedPrompt(Generic[C]):
    """The first choice sets `replica` and calls `release`; the others `wait`."""

    def __init__(self, tokens: int) -> None:
        self.replica: ReplicaState[C] | None = None  # of the first choice
        self.long = tokens >= SHARED_TOKENS
        self.computed = not self.long  # or the first choice has ended: a further one can start
        self._waiting: list[Callable[[Exception | None], None]] = []

    def wait(self, start: Callable[[Exception | None], None]) -> None:
        """Calls `start` when the prompt is computed, with the failure of the first choice if it has failed before."""
        self._waiting.append(start)

    def release(self, failure: Exception | None = None) -> None:
        """The prompt is computed, or the first choice has ended. Idempotent."""
        self.computed = True
        waiting, self._waiting = self._waiting, []
        for start in waiting:
            start(failure)

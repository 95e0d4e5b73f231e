"""What a choice needs of the fleet: a replica for each attempt."""

from collections.abc import Sequence
from typing import Protocol

from headrace_router.core.choice_request import ChoiceRequest
from headrace_router.core.not_finite import NotFiniteTable
from headrace_router.core.replica_state import C, ReplicaState
from headrace_router.core.suspect_table import SuspectTable


class MustWaitError(Exception):
    """Replicas are ready, but the choice may use none of them yet: search again after a pause."""


class Placement(Protocol[C]):
    """Chooses replicas. `output_tokens`: of earlier attempts, to be computed again like the prompt."""

    @property
    def suspects(self) -> SuspectTable:
        """The requests that are not run."""

    @property
    def not_finite(self) -> NotFiniteTable:
        """Replicas whose output was not finite."""

    def place(
        self,
        request: ChoiceRequest,
        output_tokens: int,
        excluded: Sequence[ReplicaState[C]],
        *,
        preferred: object = None,
        alone: bool = False,
        urgent: bool = False,
    ) -> ReplicaState[C] | None:
        """A ready replica of the request's model and revision that is not excluded, or None.

        Raises MustWaitError; RevisionReplacedError for a stream that no replica can continue any more.

        preferred: the replica to choose if it is ready and has room. alone: only one that runs nothing. urgent: a
        stream does not wait while replicas continue others.
        """

    def cached_tokens(self, replica: ReplicaState[C], request: ChoiceRequest) -> int:
        """Leading tokens of the prompt that are in the replica's cache, as far as it is known."""

    def prefill_source(
        self, target: ReplicaState[C], request: ChoiceRequest, output_tokens: int
    ) -> ReplicaState[C] | None:
        """The prefill replica that should compute the prompt for `target`; None when the target should."""

    def sweep(self) -> None:
        """Called after each attempt: an idle link to a replica that is no longer a member can be closed."""

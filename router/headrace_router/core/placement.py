"""What a choice needs of the fleet: a replica for each attempt."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol

from headrace_router.core.choice_request import ChoiceRequest
from headrace_router.core.decision import Decision
from headrace_router.core.kv_source import KvSource
from headrace_router.core.policy.interface import Prediction
from headrace_router.core.replica_state import C, ReplicaState


class MustWaitError(Exception):
    """Replicas are ready, but the choice may use none of them yet: search again after a pause."""


@dataclass(frozen=True, slots=True)
class Placed(Generic[C]):
    """Where an attempt runs, and where the KV blocks of its prompt come from."""

    replica: ReplicaState[C]
    source: KvSource[C] | None = None  # None: what its cache lacks is computed there
    expected_tokens: int = 0  # of the prompt, in its cache
    decision: Decision | None = None  # None: it was not chosen by a policy

    @property
    def prediction(self) -> Prediction | None:
        """None: the replica was not chosen by a policy that predicts."""
        return self.decision.prediction if self.decision is not None else None

    def fetching_from(self, holder: KvSource[C]) -> "Placed[C]":
        """There, too, with the blocks of this holder: what was predicted was another way to get them."""
        decision = self.decision
        if decision is not None:
            decision = replace(
                decision, prediction=None, source_id=holder.replica.replica_id, source_computes=not holder.cached_only
            )
        return replace(self, source=holder, decision=decision)


class Placement(Protocol[C]):
    """Chooses replicas. `output_tokens`: of earlier attempts, to be computed again like the prompt."""

    def place(
        self,
        request: ChoiceRequest,
        output_tokens: int,
        excluded: Sequence[ReplicaState[C]],
        *,
        preferred: object = None,
        urgent: bool = False,
        sources: bool = True,
    ) -> Placed[C] | None:
        """A ready replica of the request's model and revision that is not excluded, or None.

        Raises MustWaitError; RevisionReplacedError for a stream that no replica can continue any more.

        preferred: the replica to choose if it is ready and has room. urgent: a stream does not wait while
        replicas continue others. sources: whether another replica may compute or send the prompt's KV blocks.
        """

    def finished(self, request: ChoiceRequest, output_tokens: int) -> None:
        """The answer is complete, with so many tokens."""

    def sweep(self) -> None:
        """Called after each attempt: an idle link to a replica that is no longer a member can be closed."""

"""Chooses replicas of a fleet for attempts. Pure."""

from collections.abc import Callable, Collection, Sequence
from typing import Generic

from headrace_router.core.choice_request import ChoiceRequest
from headrace_router.core.errors import RevisionReplacedError
from headrace_router.core.fleet import ARRIVALS, Fleet
from headrace_router.core.not_finite import NotFiniteTable
from headrace_router.core.placement import MustWaitError
from headrace_router.core.policy import Policy, Work
from headrace_router.core.policy.disaggregate import LEAST_TOKENS, Mode, choose_source
from headrace_router.core.prefix.hash_scheme import HashScheme
from headrace_router.core.replica_state import C, ReplicaState
from headrace_router.core.suspect_table import SuspectTable


class FleetPlacement(Generic[C]):
    """Implements `Placement`: health, isolation and trials limit the replicas, and the policy chooses among these."""

    def __init__(
        self,
        fleet: Fleet[C],
        policy: Policy,
        *,
        clock: Callable[[], float],
        disaggregation: Mode = "auto",
        least_disaggregated: int = LEAST_TOKENS,
    ) -> None:
        """least_disaggregated: tokens of the shortest prompt that a prefill replica may compute."""
        self.suspects = SuspectTable(clock)
        self._fleet = fleet
        self._policy = policy
        self._clock = clock
        self._disaggregation: Mode = disaggregation
        self._least_disaggregated = least_disaggregated

    @property
    def not_finite(self) -> NotFiniteTable:
        """Replicas whose output was not finite."""
        return self._fleet.not_finite

    def sweep(self) -> None:
        """Called after each attempt: an idle link to a replica that is no longer a member can be closed."""
        self._fleet.sweep()

    def schemes(self, model: str, revision: str) -> set[HashScheme]:
        """How the blocks of a prompt are hashed; none if the policy does not look for them."""
        if not self._policy.uses_cache:
            return set()
        return {replica.scheme for replica in self._fleet.serving(model, revision) if replica.scheme is not None}

    def cached_tokens(self, replica: ReplicaState[C], request: ChoiceRequest) -> int:
        """Leading tokens of the prompt that are in the replica's cache, as far as it is known."""
        return self._cached((replica,), request)[0]

    def _cached(self, replicas: Sequence[ReplicaState[C]], request: ChoiceRequest) -> list[int]:
        """By replica. The last token is always computed."""
        limit = len(request.prompt_token_ids) - 1
        by_scheme = {
            scheme: blocks.cached_tokens(self._fleet.index, limit) for scheme, blocks in request.blocks.items()
        }
        return [
            int(by_scheme[replica.scheme][replica.blocks.slot])
            if replica.blocks is not None and replica.scheme in by_scheme
            else 0
            for replica in replicas
        ]

    def _work(self, candidates: Sequence[ReplicaState[C]], request: ChoiceRequest, output_tokens: int) -> Work:
        return Work(request, output_tokens, self._cached(candidates, request))

    def place(
        self,
        request: ChoiceRequest,
        output_tokens: int,
        excluded: Collection[ReplicaState[C]],
        *,
        preferred: object = None,
        alone: bool = False,
        urgent: bool = False,
    ) -> ReplicaState[C] | None:
        """A ready replica of the request's model and revision that is not excluded, or None.

        Raises MustWaitError, and RevisionReplacedError for a stream when no replica of its revision can come.
        """
        serving = self._fleet.serving(request.model, request.revision)
        if output_tokens and not serving and self._fleet.is_replaced(request):
            raise RevisionReplacedError(
                "The model was replaced by another revision, which cannot continue this answer; send the request again."
            )
        candidates = [replica for replica in serving if replica not in excluded]
        if not candidates:
            return None
        if alone:
            return self._place_alone(candidates, request, output_tokens)
        free = [replica for replica in candidates if not replica.isolated]
        if output_tokens and not urgent:
            free = [replica for replica in free if len(replica.arriving) < ARRIVALS]
        if not free:
            raise MustWaitError
        open_ = [replica for replica in free if not replica.reserved] or free
        open_ = [replica for replica in open_ if not self._fleet.not_finite.avoids(replica.build)] or open_
        steady = [replica for replica in open_ if not replica.speed.slow]
        if steady and len(steady) < len(open_) and not output_tokens:
            now = self._clock()
            due = [replica for replica in open_ if replica.speed.slow and replica.speed.probe_due(now)]
            if due:
                return due[0]
        for replica in steady:
            if replica is preferred and replica.has_room:
                return replica
        best = steady or open_
        return best[self._policy.choose(best, self._work(best, request, output_tokens))]

    def _place_alone(
        self, candidates: list[ReplicaState[C]], request: ChoiceRequest, output_tokens: int
    ) -> ReplicaState[C]:
        """One that was reserved and runs nothing: until there is one, all routers' requests avoid the reserved one.

        An idle one is reserved, too: two routers that lose a replica would use the same one at once, and a choice that
        ends it would seem to be that of each.
        """
        free = [replica for replica in candidates if not replica.isolated]
        idle = [replica for replica in free if replica.reserved_here and not replica.requests and not replica.attempts]
        if idle:
            return idle[self._policy.choose(idle, self._work(idle, request, output_tokens))]
        if free:
            min(free, key=lambda replica: (not replica.reserved_here, replica.reserved, replica.requests)).reserve()
        raise MustWaitError

    def prefill_source(
        self, target: ReplicaState[C], request: ChoiceRequest, output_tokens: int
    ) -> ReplicaState[C] | None:
        """The prefill replica that should compute a prompt for the target, or None when the target should."""
        sources = [
            replica
            for replica in self._fleet.of_model(request.model)
            if replica.ready_source
            and replica is not target
            and replica.revision == request.revision
            and not self._fleet.not_finite.avoids(replica.build)
        ]
        tokens = len(request.prompt_token_ids) + output_tokens
        chosen = choose_source(tokens, target, sources, self._disaggregation, self._least_disaggregated)
        return sources[chosen] if chosen is not None else None

"""Chooses replicas of a fleet for attempts. Pure."""

from collections.abc import Callable, Collection, Sequence
from typing import Generic

import numpy as np

from headrace_router.core.answer_length import AnswerLength
from headrace_router.core.choice_request import ChoiceRequest
from headrace_router.core.decision import MAX_CONSIDERED, Considered, Decision
from headrace_router.core.disaggregation_mode import Mode
from headrace_router.core.errors import RevisionReplacedError
from headrace_router.core.fleet import ARRIVALS, Fleet
from headrace_router.core.kv_source import KvSource
from headrace_router.core.placement import MustWaitError, Placed
from headrace_router.core.policy.disaggregate import LEAST_TOKENS
from headrace_router.core.policy.interface import Plan, Policy, Tokens, Work
from headrace_router.core.prefix.hash_scheme import HashScheme
from headrace_router.core.replica_state import C, ReplicaState
from headrace_router.core.replica_table import Rows

_NO_ROWS = np.zeros(0, np.int64)


class FleetPlacement(Generic[C]):
    """Implements `Placement`: health limits the replicas, and the policy chooses among these."""

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
        self._fleet = fleet
        self._policy = policy
        self._clock = clock
        self._disaggregation: Mode = disaggregation
        self._least_disaggregated = least_disaggregated
        self._answers = AnswerLength()

    def sweep(self) -> None:
        """Called after each attempt: an idle link to a replica that is no longer a member can be closed."""
        self._fleet.sweep()

    def finished(self, request: ChoiceRequest, output_tokens: int) -> None:
        """An answer is complete."""
        self._answers.add(request.model, output_tokens)

    def schemes(self, model: str, revision: str) -> set[HashScheme]:
        """How the blocks of a prompt are hashed; none if the policy does not look for them."""
        if not self._policy.uses_cache:
            return set()
        table = self._fleet.table
        table.refresh()
        return set(table.schemes(table.usable(model, revision, self._clock(), prefill=False)))

    def place(
        self,
        request: ChoiceRequest,
        output_tokens: int,
        excluded: Collection[ReplicaState[C]],
        *,
        preferred: object = None,
        urgent: bool = False,
        sources: bool = True,
    ) -> Placed[C] | None:
        """A ready replica of the request's model and revision that is not excluded, or None.

        Raises MustWaitError, and RevisionReplacedError for a stream when no replica of its revision can come.
        """
        table = self._fleet.table
        table.refresh()
        rows = table.usable(request.model, request.revision, self._clock(), prefill=False)
        if self._policy.shares_roles and self._disaggregation == "shared":
            computing = table.usable(request.model, request.revision, self._clock(), prefill=True)
            rows = np.concatenate((rows, computing))
        if output_tokens and not len(rows) and self._fleet.is_replaced(request):
            raise RevisionReplacedError(
                "The model was replaced by another revision, which cannot continue this answer; send the request again."
            )
        if excluded:
            rows = rows[[replica not in excluded for replica in table.at(rows)]]
        if not len(rows):
            return None
        open_ = rows
        if output_tokens and not urgent:
            open_ = rows[table.column("arrivals", rows) < ARRIVALS]
        if not len(open_):
            raise MustWaitError
        slow = table.column("slow", open_) > 0
        if slow.any() and not slow.all():
            now = self._clock()
            due = [replica for replica in table.at(open_[slow]) if not output_tokens and replica.speed.probe_due(now)]
            if due:
                return Placed(due[0])
        steady = open_[~slow]
        for replica in table.at(steady) if preferred is not None else ():
            if replica is preferred and replica.has_room:
                return Placed(replica)
        return self._plan(_or(steady, open_), request, output_tokens, sources=sources)

    def _plan(self, rows: Rows, request: ChoiceRequest, output_tokens: int, *, sources: bool) -> Placed[C]:
        table = self._fleet.table
        prefill = _NO_ROWS
        if sources and self._disaggregation != "off":
            prefill = table.usable(request.model, request.revision, self._clock(), prefill=True)
        if not output_tokens:
            for blocks in request.blocks.values():
                self._fleet.index.reuse.asked(blocks.digests)
        candidates = table.at(rows)
        computing = table.at(prefill)
        cached = self._cached(rows, request)
        work = Work(
            request,
            output_tokens,
            cached,
            self._cached(rows, request, held=True) if cached.any() else cached,
            self._cached(prefill, request),
            self._answers.left(request.model, request.sampling.max_tokens, output_tokens),
            self._disaggregation,
            self._least_disaggregated,
            self._fleet.index.reuse.share,
        )
        plan = self._policy.plan(table.view(rows), table.view(prefill), work)
        source = None
        if plan.source is not None:
            source = KvSource(computing[plan.source], cached_only=False)
        elif plan.holder is not None and sources:
            source = KvSource(candidates[plan.holder], cached_only=True)
        decision = Decision(
            candidates[plan.target].replica_id,
            len(candidates),
            work.tokens,
            plan.prediction,
            source.replica.replica_id if source is not None else "",
            source is not None and not source.cached_only,
            _considered(candidates, plan, cached),
        )
        return Placed(candidates[plan.target], source, int(cached[plan.target]), decision)

    def _cached(self, rows: Rows, request: ChoiceRequest, *, held: bool = False) -> Tokens:
        """Leading tokens of the prompt that are in the replicas' caches, as far as it is known, without its last."""
        cached = np.zeros(len(rows), np.int64)
        limit = len(request.prompt_token_ids) - 1
        for scheme, blocks in request.blocks.items() if len(rows) else ():
            lengths = blocks.cached_tokens(self._fleet.index, limit, held=held)
            if lengths.any():
                cached += self._fleet.table.of_slots(lengths, scheme, rows)
        return cached


def _considered(candidates: Sequence[ReplicaState[C]], plan: Plan, cached: Tokens) -> tuple[Considered, ...]:
    """The candidates with the lowest costs, and the chosen one."""
    if plan.costs is None:
        return ()
    few = min(MAX_CONSIDERED, len(plan.costs))
    lowest = np.argpartition(plan.costs, few - 1)[:few]
    best = lowest[plan.costs[lowest].argsort(kind="stable")].tolist()
    if plan.target not in best:
        best[-1] = plan.target
    return tuple(
        Considered(candidates[place].replica_id, float(plan.costs[place]), int(cached[place])) for place in best
    )


def _or(rows: Rows, otherwise: Rows) -> Rows:
    return rows if len(rows) else otherwise

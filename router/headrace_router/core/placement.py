"""Chooses a replica for each attempt of a choice, and says why. Pure."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic, Protocol

import numpy as np

from headrace_proto.replica_pb2 import Source
from headrace_router.core.errors import RevisionReplacedError
from headrace_router.core.fleet import ARRIVALS, Fleet
from headrace_router.core.policy.interface import (
    ChoiceRequest,
    Mode,
    PlacementTask,
    Policy,
    Prediction,
    RequestPlacement,
    Tokens,
)
from headrace_router.core.policy.predicted import LEAST_TOKENS
from headrace_router.core.replica_blocks import HashScheme
from headrace_router.core.replica_state import C, ReplicaState
from headrace_router.core.replica_table import Rows

WEIGHT = 0.02  # share of the newest answer in the mean
FIRST = 256.0  # tokens, until answers are known
MOST_MODELS = 1024


class AnswerLength:
    """How long answers are: the mean of the recent ones of each model, of one router."""

    def __init__(self) -> None:
        self._means: dict[str, float] = {}

    def add(self, model: str, tokens: int) -> None:
        """An answer is complete."""
        mean = self._means.get(model, FIRST)
        if model in self._means or len(self._means) < MOST_MODELS:
            self._means[model] = mean + WEIGHT * (tokens - mean)

    def left(self, model: str, max_tokens: int, output_tokens: int = 0) -> float:
        """Tokens that follow so many of an answer, at least one. max_tokens: of this one; 0 = no limit.

        As if lengths were distributed exponentially: what follows does not depend on what there is.
        """
        mean = self._means.get(model, FIRST)
        return max(1.0, min(mean, max_tokens - output_tokens) if max_tokens else mean)


@dataclass(frozen=True, slots=True)
class KvSource(Generic[C]):
    """A replica that holds the prompt's KV blocks, or computes them for another one."""

    replica: ReplicaState[C]
    cached_only: bool  # it sends the blocks that it holds, and computes none

    def message(self) -> Source:
        return Source(replica_id=self.replica.replica_id, address=self.replica.address, cached_only=self.cached_only)

    def expect(self, attempt_id: bytes, tokens: int, target: ReplicaState[C]) -> None:
        """An attempt starts at the target, whose prompt it may have to compute."""
        if not self.cached_only:
            self.replica.add_remote_prompt(attempt_id, tokens, lambda: target.has_reported(attempt_id))

    def remove(self, attempt_id: bytes) -> None:
        """The prompt is computed, or not needed any more."""
        self.replica.discard_remote_prompt(attempt_id)


MAX_CONSIDERED = 4  # candidates that are kept, the best ones


@dataclass(frozen=True, slots=True)
class Considered:
    """A candidate of a decision."""

    replica_id: str
    cost: float  # predicted seconds: until the first token, of the answer, and by which others are delayed
    cached_tokens: int  # prompt tokens that its cache had or was about to have


@dataclass(frozen=True, slots=True)
class Decision:
    """Why an attempt was placed where it was. Without a policy that predicts, `considered` is empty."""

    replica_id: str
    candidates: int  # that could have been chosen
    tokens: int  # to be in the cache: of the prompt, and of earlier attempts
    prediction: Prediction | None = None
    source_id: str = ""  # the replica that computes the prompt or sends its cached blocks
    source_computes: bool = False
    considered: tuple[Considered, ...] = ()
    most_cached: int = 0  # tokens of the prompt, at the candidate with most of it
    most_cached_id: str = ""
    most_cached_full: bool = False  # it had no room for one more attempt

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


class MustWaitError(Exception):
    """Replicas are ready, but the choice may use none of them yet: search again after a pause."""


@dataclass(frozen=True, slots=True)
class Placed(Generic[C]):
    """Where an attempt runs, and where the KV blocks of its prompt come from."""

    replica: ReplicaState[C]
    source: KvSource[C] | None = None  # None: what its cache lacks is computed there
    expected_tokens: int = 0  # prompt tokens that the replica's cache is expected to have
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
        cached, offloaded = self._cached(rows, request)
        held = np.zeros_like(cached)
        if cached.any() and sources:  # another replica reads what is in the cache itself
            held = np.subtract(*self._cached(rows, request, held=True))
        work = PlacementTask(
            request,
            output_tokens,
            cached,
            offloaded,
            held,
            np.subtract(*self._cached(prefill, request)),
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
        most = int(cached.argmax())
        decision = Decision(
            candidates[plan.target].replica_id,
            len(candidates),
            work.tokens,
            plan.prediction,
            source.replica.replica_id if source is not None else "",
            source is not None and not source.cached_only,
            _considered(candidates, plan, cached),
            int(cached[most]),
            candidates[most].replica_id,
            not candidates[most].has_room,
        )
        return Placed(candidates[plan.target], source, int(cached[plan.target]), decision)

    def _cached(self, rows: Rows, request: ChoiceRequest, *, held: bool = False) -> tuple[Tokens, Tokens]:
        """Leading tokens of the prompt that are in the replicas' caches, as far as it is known, without its last.

        And how many of these are in host memory or on disk alone.
        """
        cached, offloaded = np.zeros((2, len(rows)), np.int64)
        limit = len(request.prompt_token_ids) - 1
        for scheme, blocks in request.blocks.items() if len(rows) else ():
            lengths = blocks.cached_tokens(self._fleet.index, limit, held=held)
            if lengths.any():
                found = self._fleet.table.of_slots(lengths, scheme, rows)
                cached += found
                offloaded += self._fleet.table.offloaded(blocks, scheme, self._fleet.index, rows, found)
        return cached, offloaded


def _considered(
    candidates: Sequence[ReplicaState[C]], plan: RequestPlacement, cached: Tokens
) -> tuple[Considered, ...]:
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

"""The set of replicas: which can take work, and what models they serve. Pure."""

from collections.abc import Callable, Collection, Iterator
from typing import Generic, Protocol

from headrace_proto.control_pb2 import HeardReplica, Member, MemberList, RouterReport
from headrace_proto.replica_pb2 import REPLICA_STATE_DEAD, REPLICA_STATE_STARTING
from headrace_router.core.choice_request import ChoiceRequest
from headrace_router.core.errors import DrainedError, ModelNotFoundError, NoReplicaError, RevisionReplacedError
from headrace_router.core.not_finite import NotFiniteTable
from headrace_router.core.placement import MustWaitError
from headrace_router.core.policy import Policy
from headrace_router.core.policy.disaggregate import LEAST_TOKENS, Mode, choose_source
from headrace_router.core.policy.rebalance import Rebalancer
from headrace_router.core.replica_state import C, ReplicaState
from headrace_router.core.served_models import ServedModel, ServedModels
from headrace_router.core.suspect_table import SuspectTable

PAUSE_SECONDS = 1.0  # between two calls of `maintain`: longer ones are pauses of this process
ARRIVALS = 4  # streams that one replica continues at a time, until they have tokens (docs/reliability.md I24)


class Link(Protocol[C]):
    """Keeps a stream open to one replica, and its state up to date."""

    @property
    def state(self) -> ReplicaState[C]: ...

    def close(self) -> None:
        """Starts to close the stream, which ends every attempt on it; returns at once."""

    def check_stall(self) -> None:
        """Ends the stream, and opens another one, if the replica has made no step for too long; returns at once."""


class Fleet(Generic[C]):
    """Keeps one link per member, and places choices on the members' replicas."""

    def __init__(
        self,
        open_link: Callable[[Member], Link[C]],
        policy: Policy,
        started: int,
        *,
        clock: Callable[[], float],
        jitter: Callable[[], float],
        disaggregation: Mode = "auto",
        least_disaggregated: int = LEAST_TOKENS,
    ) -> None:
        """`open_link` starts to connect, and returns at once. started: unix seconds.

        clock: as that of the replicas' heartbeats. jitter: uniform in [0, 1), different for each router.
        least_disaggregated: tokens of the shortest prompt that a prefill replica may compute.
        """
        self._open_link = open_link
        self._policy = policy
        self._disaggregation: Mode = disaggregation
        self._least_disaggregated = least_disaggregated
        self._rebalancer = Rebalancer(jitter)
        self.suspects = SuspectTable(clock)
        self.not_finite = NotFiniteTable(clock)
        self._clock = clock
        self._maintained: float | None = None
        self._ready: set[int] = set()  # links that were ready at the last `rebalance`
        self._links: dict[tuple[str, str, int], Link[C]] = {}
        self._models = ServedModels(started)
        self._version: tuple[bytes, int] = (b"", 0)

    @property
    def replicas(self) -> list[ReplicaState[C]]:
        return [link.state for link in self._links.values()]

    def update(self, members: MemberList) -> None:
        """Applies a member list of the controller. An older one of the same controller start is dropped."""
        epoch, version = self._version
        if members.epoch and members.epoch == epoch and members.version < version:
            return
        self._version = members.epoch, members.version
        listed: dict[tuple[str, str, int], Member] = {}
        for member in members.members:
            if member.state in (REPLICA_STATE_DEAD, REPLICA_STATE_STARTING) or not member.address:
                continue
            listed[member.address, member.identity.replica_id, member.identity.generation] = member
        for key, link in self._links.items():
            link.state.listing = listed.pop(key, None)
        for key, member in listed.items():
            self._links[key] = self._open_link(member)
        self._models.update(members.models)
        self.sweep()

    def report(self, router_id: str) -> RouterReport:
        """From which replicas this router receives messages, for the controller."""
        replicas = [
            HeardReplica(replica_id=replica.replica_id, generation=replica.identity.generation, heard=replica.heard)
            for replica in self.replicas
        ]
        return RouterReport(router_id=router_id, replicas=replicas, not_finite=self.not_finite.report())

    def maintain(self) -> None:
        """Called several times a second: finds slow replicas, and moves the attempts of a stalled one to others."""
        now = self._clock()
        pause = now - self._maintained if self._maintained is not None else 0.0
        self._maintained = now
        if pause > PAUSE_SECONDS:  # all seem stalled until their frames are read
            for replica in self.replicas:
                replica.extend_heartbeat(pause)
        for link in list(self._links.values()):
            link.check_stall()
        for replica in self.replicas:
            if replica.speed.complete and replica.facts is not None:
                peers = [other for other in self._serving(replica.model, replica.revision) if other is not replica]
                models = [other.load.step_model for other in peers if not other.speed.slow]
                replica.speed.evaluate(replica.load.step_model, models, replica.kv_tokens, now)
            if replica.connected and replica.stalled and replica.attempts and self._has_peer(replica):
                replica.end_attempts()
            elif replica.reserved and not replica.isolated:
                self._move_away(replica)
        self.sweep()

    def sweep(self) -> None:
        """Closes idle links to unlisted replicas."""
        for key, link in list(self._links.items()):
            if link.state.listing is None and not link.state.attempts:  # running attempts may finish
                del self._links[key]
                link.close()

    def close(self) -> None:
        """Starts to close every link, which ends every attempt."""
        links = list(self._links.values())
        self._links.clear()
        for link in links:
            link.close()

    @property
    def ready(self) -> bool:
        """Whether any model has a ready replica: a model without one refuses its own requests only."""
        return any(replica.ready for replica in self.replicas)

    def model_ready(self, name: str) -> bool:
        """Whether the model with this name or alias has a ready replica; false for an unknown one."""
        known = next((model.name for model in self.models() if name == model.name or name in model.aliases), None)
        return known is not None and any(replica.ready for replica in self._of_model(known))

    def models(self) -> list[ServedModel]:
        """All models, listed by the controller or found on a replica."""
        return self._models.found(self.replicas)

    def model(self, name: str) -> ServedModel:
        """The model with this name or alias. Raises ModelNotFoundError."""
        for model in self.models():
            if name == model.name or name in model.aliases:
                return model
        shown = name if len(name) <= 100 else name[:99] + "…"
        raise ModelNotFoundError(
            f"The model '{shown}' does not exist; GET /v1/models lists those that do.", param="model"
        )

    def card(self, name: str) -> C:
        """The card of the revision that new requests use. Raises ModelNotFoundError, NoReplicaError or DrainedError."""
        model = self.model(name)
        ready = [replica for replica in self._of_model(model.name) if replica.ready and replica.card is not None]
        revision = self._models.revision(model.name, ready)
        card = next((replica.card for replica in ready if replica.revision == revision), None)
        if card is None and self._models.drained(model.name):
            raise DrainedError(
                f"All replicas of '{model.name}' are drained by the operator of this server; use another model, or ask "
                "the operator."
            )
        if card is None:
            raise NoReplicaError(f"No replica of '{model.name}' is ready; try again in a moment.")
        return card

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
        serving = self._serving(request.model, request.revision)
        if output_tokens and not serving and self._is_replaced(request):
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
        open_ = [replica for replica in open_ if not self.not_finite.avoids(replica.build)] or open_
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
        return best[self._policy.choose(best, request, output_tokens)]

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
            return idle[self._policy.choose(idle, request, output_tokens)]
        if free:
            min(free, key=lambda replica: (not replica.reserved_here, replica.reserved, replica.requests)).reserve()
        raise MustWaitError

    def prefill_source(
        self, target: ReplicaState[C], request: ChoiceRequest, output_tokens: int
    ) -> ReplicaState[C] | None:
        """The prefill replica that should compute a prompt for the target, or None when the target should."""
        sources = [
            replica
            for replica in self._of_model(request.model)
            if replica.ready_source
            and replica is not target
            and replica.revision == request.revision
            and not self.not_finite.avoids(replica.build)
        ]
        tokens = len(request.prompt_token_ids) + output_tokens
        chosen = choose_source(tokens, target, sources, self._disaggregation, self._least_disaggregated)
        return sources[chosen] if chosen is not None else None

    def rebalance(self, now: float) -> None:
        """Moves a stream away from each replica that is short of memory or time, when another has free capacity."""
        served: dict[tuple[str, str], list[ReplicaState[C]]] = {}
        ready: set[int] = set()
        for replica in self.replicas:
            if replica.ready:
                ready.add(id(replica))
                served.setdefault((replica.model, replica.revision), []).append(replica)
        if self._ready - ready:
            self._rebalancer.replica_lost(now)
        self._ready = ready
        for replicas in served.values():
            for hot, cold in self._rebalancer.choose_moves(replicas, now):
                target, attempt = replicas[cold], replicas[hot].newest_started()
                if attempt is not None and self._takes_streams(target):
                    attempt.move(target)

    def _takes_streams(self, replica: ReplicaState[C]) -> bool:
        return not (replica.speed.slow or replica.isolated or replica.reserved or len(replica.arriving) >= ARRIVALS)

    def _move_away(self, reserved: ReplicaState[C]) -> None:
        """Moves streams to the peers, as many as these continue at a time: a choice waits to run there alone."""
        for replica in self._serving(reserved.model, reserved.revision):
            if replica is reserved or not self._takes_streams(replica):
                continue
            for _ in range(ARRIVALS - len(replica.arriving)):
                attempt = reserved.newest_started()
                if attempt is None:
                    return
                attempt.move(replica)

    def _has_peer(self, stalled: ReplicaState[C]) -> bool:
        """Whether another replica can take its attempts: one of another revision cannot."""
        return bool(self._serving(stalled.model, stalled.revision))

    def _serving(self, model: str, revision: str) -> list[ReplicaState[C]]:
        return [replica for replica in self._of_model(model) if replica.ready and replica.revision == revision]

    def _is_replaced(self, request: ChoiceRequest) -> bool:
        """Whether the spec names another revision than the request's, and no replica has the latter and will stay."""
        named = self._models.named_revision(request.model)
        if not named or named == request.revision:
            return False
        replicas = list(self._of_model(request.model))
        staying = {replica.revision for replica in replicas if replica.listing is not None and not replica.leaving}
        # A name that no replica has may be one of another form, as a branch is.
        return named in staying and request.revision not in staying

    def _of_model(self, name: str) -> Iterator[ReplicaState[C]]:
        return (replica for replica in self.replicas if replica.facts is not None and replica.model == name)

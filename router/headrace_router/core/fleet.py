"""The set of replicas: which can take work, and what models they serve. Pure."""

from collections.abc import Callable, Iterator
from typing import Generic, Protocol

from headrace_proto.control_pb2 import HeardReplica, Member, MemberList, RouterReport
from headrace_proto.replica_pb2 import REPLICA_STATE_DEAD, REPLICA_STATE_STARTING
from headrace_router.core.choice_request import ChoiceRequest
from headrace_router.core.errors import DrainedError, ModelNotFoundError, NoReplicaError
from headrace_router.core.not_finite import NotFiniteTable
from headrace_router.core.policy.rebalance import Rebalancer
from headrace_router.core.prefix.prefix_index import PrefixIndex
from headrace_router.core.replica_state import C, ReplicaState
from headrace_router.core.served_models import ServedModel, ServedModels

PAUSE_SECONDS = 1.0  # between two calls of `maintain`: longer ones are pauses of this process
SWEPT_SEGMENTS = 8  # of the prefix index, in each call of `maintain`: about a millisecond
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
        started: int,
        *,
        clock: Callable[[], float],
        jitter: Callable[[], float],
        index: PrefixIndex | None = None,
    ) -> None:
        """`open_link` starts to connect, and returns at once. started: unix seconds.

        clock: as that of the replicas' heartbeats. jitter: uniform in [0, 1), different for each router. index: of the
        blocks of the links' replicas.
        """
        self._open_link = open_link
        self._rebalancer = Rebalancer(jitter)
        self.index = index if index is not None else PrefixIndex(0)
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
            if replica.blocks is not None:
                replica.blocks.expire(now)
            if replica.speed.complete and replica.facts is not None:
                peers = [other for other in self.serving(replica.model, replica.revision) if other is not replica]
                models = [other.load.step_model for other in peers if not other.speed.slow]
                replica.speed.evaluate(replica.load.step_model, models, replica.kv_tokens, now)
            if replica.connected and replica.stalled and replica.attempts and self._has_peer(replica):
                replica.end_attempts()
            elif replica.reserved and not replica.isolated:
                self._move_away(replica)
        self.index.sweep(SWEPT_SEGMENTS)
        self.sweep()

    def sweep(self) -> None:
        """Closes idle links to unlisted replicas."""
        for key, link in list(self._links.items()):
            if link.state.listing is None and not link.state.attempts:  # running attempts may finish
                del self._links[key]
                self._close(link)

    def close(self) -> None:
        """Starts to close every link, which ends every attempt."""
        links = list(self._links.values())
        self._links.clear()
        for link in links:
            self._close(link)

    def _close(self, link: Link[C]) -> None:
        link.close()
        if link.state.blocks is not None:
            link.state.blocks.close()

    @property
    def ready(self) -> bool:
        """Whether any model has a ready replica: a model without one refuses its own requests only."""
        return any(replica.ready for replica in self.replicas)

    def model_ready(self, name: str) -> bool:
        """Whether the model with this name or alias has a ready replica; false for an unknown one."""
        known = next((model.name for model in self.models() if name == model.name or name in model.aliases), None)
        return known is not None and any(replica.ready for replica in self.of_model(known))

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
        ready = [replica for replica in self.of_model(model.name) if replica.ready and replica.card is not None]
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
        for replica in self.serving(reserved.model, reserved.revision):
            if replica is reserved or not self._takes_streams(replica):
                continue
            for _ in range(ARRIVALS - len(replica.arriving)):
                attempt = reserved.newest_started()
                if attempt is None:
                    return
                attempt.move(replica)

    def _has_peer(self, stalled: ReplicaState[C]) -> bool:
        """Whether another replica can take its attempts: one of another revision cannot."""
        return bool(self.serving(stalled.model, stalled.revision))

    def serving(self, model: str, revision: str) -> list[ReplicaState[C]]:
        """The replicas that take new requests."""
        return [replica for replica in self.of_model(model) if replica.ready and replica.revision == revision]

    def is_replaced(self, request: ChoiceRequest) -> bool:
        """Whether the spec names another revision than the request's, and no replica has the latter and will stay."""
        named = self._models.named_revision(request.model)
        if not named or named == request.revision:
            return False
        replicas = list(self.of_model(request.model))
        staying = {replica.revision for replica in replicas if replica.listing is not None and not replica.leaving}
        # A name that no replica has may be one of another form, as a branch is.
        return named in staying and request.revision not in staying

    def of_model(self, name: str) -> Iterator[ReplicaState[C]]:
        """Those that are described."""
        return (replica for replica in self.replicas if replica.facts is not None and replica.model == name)

"""The set of replicas: which can take work, and what models they serve. Pure."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol

from headrace_proto.control_pb2 import Member, MemberList
from headrace_proto.replica_pb2 import REPLICA_STATE_DEAD, REPLICA_STATE_STARTING
from headrace_router.core.errors import ModelNotFoundError, NoReplicaError
from headrace_router.core.policy import Policy, Work
from headrace_router.core.policy.disaggregate import Mode, Prompt, choose_source
from headrace_router.core.policy.rebalance import Rebalancer
from headrace_router.core.replica_state import C, ReplicaState

STALLED_CHECKS = 3  # consecutive, before the attempts of a stalled replica continue on others


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as /v1/models lists it; length and defaults are unknown until a replica was connected."""

    name: str
    aliases: tuple[str, ...]
    created: int
    max_model_len: int | None = None
    defaults: Mapping[str, float] | None = None  # of options that requests may omit


class Connection(Protocol):
    """Keeps a stream open between a ReplicaState and its replica."""

    def close(self) -> None:
        """Starts to close it; returns at once."""


class Fleet(Generic[C]):
    """Keeps one ReplicaState per member, and a connection for each."""

    def __init__(
        self,
        make_state: Callable[[Member], ReplicaState[C]],
        connect: Callable[[ReplicaState[C]], Connection],
        policy: Policy,
        started: int,
        *,
        disaggregation: Mode = "auto",
    ) -> None:
        """`connect` starts to connect, and returns at once. started: unix seconds."""
        self._make_state = make_state
        self._connect = connect
        self._policy = policy
        self._disaggregation: Mode = disaggregation
        self._rebalancer = Rebalancer()
        self._started = started
        self._replicas: dict[tuple[str, str, int], tuple[ReplicaState[C], Connection]] = {}
        self._known: dict[str, ServedModel] = {}  # as the controller lists them
        self._version: tuple[bytes, int] = (b"", 0)

    @property
    def replicas(self) -> list[ReplicaState[C]]:
        return [replica for replica, _ in self._replicas.values()]

    def update(self, members: MemberList) -> None:
        """Applies a member list of the controller. An older one of the same controller start is dropped."""
        epoch, version = self._version
        if members.epoch and members.epoch == epoch and members.version < version:
            return
        self._version = members.epoch, members.version
        listed: set[tuple[str, str, int]] = set()
        for member in members.members:
            if member.state in (REPLICA_STATE_DEAD, REPLICA_STATE_STARTING) or not member.address:
                continue
            key = member.address, member.identity.replica_id, member.identity.generation
            listed.add(key)
            if key in self._replicas:
                self._replicas[key][0].set_listing(member)
            else:
                replica = self._make_state(member)
                self._replicas[key] = replica, self._connect(replica)
        for key, (replica, _) in self._replicas.items():
            if key not in listed:
                replica.retire()
        self._known = {
            entry.name: ServedModel(entry.name, tuple(entry.aliases), entry.created or self._started)
            for entry in members.models
        }
        self.sweep()

    def sweep(self) -> None:
        """Closes idle connections to unlisted replicas; moves the attempts of a stalled replica to others."""
        for replica in self.replicas:
            if replica.connected and replica.stalled and replica.attempts:
                replica.stalled_checks += 1
                # Not at the first check: after a pause of this process all seem stalled until frames are read.
                if replica.stalled_checks > STALLED_CHECKS and self._has_ready_peer(replica):
                    replica.end_attempts()
            else:
                replica.stalled_checks = 0
        for key, (replica, connection) in list(self._replicas.items()):
            if replica.retired_and_idle:
                del self._replicas[key]
                connection.close()

    def close(self) -> None:
        """Starts to close every connection, which ends every attempt."""
        connections = [connection for _, connection in self._replicas.values()]
        self._replicas.clear()
        for connection in connections:
            connection.close()

    @property
    def ready(self) -> bool:
        """Whether every model that the cluster lists (or any, when none is listed) has a ready replica."""
        served = {replica.card.model for replica in self.replicas if replica.ready and replica.card}
        return bool(served) and served >= set(self._known)

    def models(self) -> list[ServedModel]:
        """All models, listed by the controller or found on a replica."""
        found = dict(self._known)
        for replica in self.replicas:
            card = replica.card
            if card is None:
                continue
            known = found.get(card.model) or ServedModel(card.model, (), self._started)
            length = min(known.max_model_len or card.max_model_len, card.max_model_len)
            found[card.model] = ServedModel(known.name, known.aliases, known.created, length, card.defaults)
        return sorted(found.values(), key=lambda model: model.name)

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
        """The card of the model's newest ready revision. Raises ModelNotFoundError or NoReplicaError."""
        model = self.model(name)
        newest: ReplicaState[C] | None = None
        for replica in self._of_model(model.name):
            if replica.ready and (newest is None or replica.identity.generation > newest.identity.generation):
                newest = replica
        if newest is None or newest.card is None:
            raise NoReplicaError(f"No replica of '{model.name}' is ready; try again in a moment.")
        return newest.card

    def place(self, card: C, work: Work, excluded: Collection[ReplicaState[C]]) -> ReplicaState[C] | None:
        """A ready replica of the card's model and revision that is not excluded, or None."""
        candidates = [
            replica
            for replica in self._of_model(card.model)
            if replica.ready and replica not in excluded and _revision(replica) == card.revision
        ]
        return candidates[self._policy.choose(candidates, work)] if candidates else None

    def source(self, target: ReplicaState[C], card: C, work: Work) -> ReplicaState[C] | None:
        """The prefill replica that should compute a prompt for the target, or None when the target should."""
        sources = [
            replica
            for replica in self._of_model(card.model)
            if replica.ready_source and replica is not target and _revision(replica) == card.revision
        ]
        prompt = Prompt(len(work.prompt_token_ids) + work.output_tokens_so_far)
        chosen = choose_source(prompt, target, sources, self._disaggregation)
        return sources[chosen] if chosen is not None else None

    def rebalance(self, now: float) -> None:
        """Moves a stream away from each replica that is short of memory or time, when another has free capacity."""
        served: dict[tuple[str, str], list[ReplicaState[C]]] = {}
        for replica in self.replicas:
            if replica.ready and replica.card is not None:
                served.setdefault((replica.card.model, replica.card.revision), []).append(replica)
        for replicas in served.values():
            for hot, _ in self._rebalancer.choose_moves(replicas, now):
                attempt = replicas[hot].newest_started()
                if attempt is not None:
                    attempt.move()

    def _has_ready_peer(self, stalled: ReplicaState[C]) -> bool:
        card = stalled.card
        return card is not None and any(replica.ready for replica in self._of_model(card.model))

    def _of_model(self, name: str) -> Iterator[ReplicaState[C]]:
        return (replica for replica in self.replicas if replica.card is not None and replica.card.model == name)


@dataclass(frozen=True, slots=True)
class CardPlacement(Generic[C]):
    """Placement in the fleet for requests of one model and revision."""

    fleet: Fleet[C]
    card: C

    def place(self, work: Work, excluded: Collection[ReplicaState[C]]) -> ReplicaState[C] | None:
        return self.fleet.place(self.card, work, excluded)

    def prefill_source(self, target: ReplicaState[C], work: Work) -> ReplicaState[C] | None:
        return self.fleet.source(target, self.card, work)

    def sweep(self) -> None:
        self.fleet.sweep()


def _revision(replica: ReplicaState[C]) -> str | None:
    return replica.card.revision if replica.card is not None else None

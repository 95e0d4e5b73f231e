"""The set of replicas: which can take work, and what models they serve. Pure."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol

from headrace_proto.control_pb2 import Member, MemberList
from headrace_proto.replica_pb2 import REPLICA_STATE_DEAD, REPLICA_STATE_STARTING
from headrace_router.core.choice_request import ChoiceRequest
from headrace_router.core.errors import ModelNotFoundError, NoReplicaError
from headrace_router.core.policy import Policy
from headrace_router.core.policy.disaggregate import Mode, choose_source
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
    defaults: Mapping[str, float] | None = None  # of options that requests may omit, by name


class Link(Protocol[C]):
    """Keeps a stream open to one replica, and its state up to date."""

    @property
    def state(self) -> ReplicaState[C]: ...

    def close(self) -> None:
        """Starts to close the stream, which ends every attempt on it; returns at once."""


class Fleet(Generic[C]):
    """Keeps one link per member, and places choices on the members' replicas."""

    def __init__(
        self,
        open_link: Callable[[Member], Link[C]],
        policy: Policy,
        started: int,
        *,
        disaggregation: Mode = "auto",
    ) -> None:
        """`open_link` starts to connect, and returns at once. started: unix seconds."""
        self._open_link = open_link
        self._policy = policy
        self._disaggregation: Mode = disaggregation
        self._rebalancer = Rebalancer()
        self._started = started
        self._links: dict[tuple[str, str, int], Link[C]] = {}
        self._known: dict[str, ServedModel] = {}  # as the controller lists them
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
        self._known = {
            entry.name: ServedModel(entry.name, tuple(entry.aliases), entry.created or self._started)
            for entry in members.models
        }
        self.sweep()

    def sweep(self) -> None:
        """Closes idle links to unlisted replicas; moves the attempts of a stalled replica to others."""
        for replica in self.replicas:
            if replica.connected and replica.stalled and replica.attempts:
                replica.stalled_checks += 1
                # Not at the first check: after a pause of this process all seem stalled until frames are read.
                if replica.stalled_checks > STALLED_CHECKS and self._has_ready_peer(replica):
                    replica.end_attempts()
            else:
                replica.stalled_checks = 0
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
        """Whether every model that the cluster lists (or any, when none is listed) has a ready replica."""
        served = {replica.model for replica in self.replicas if replica.ready}
        return bool(served) and served >= set(self._known)

    def models(self) -> list[ServedModel]:
        """All models, listed by the controller or found on a replica."""
        found = dict(self._known)
        for replica in self.replicas:
            facts = replica.facts
            if facts is None:
                continue
            known = found.get(replica.model) or ServedModel(replica.model, (), self._started)
            length = min(known.max_model_len or facts.max_model_len, facts.max_model_len)
            found[known.name] = ServedModel(known.name, known.aliases, known.created, length, replica.defaults)
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

    def place(
        self, request: ChoiceRequest, output_tokens: int, excluded: Collection[ReplicaState[C]]
    ) -> ReplicaState[C] | None:
        """A ready replica of the request's model and revision that is not excluded, or None."""
        candidates = [
            replica
            for replica in self._of_model(request.model)
            if replica.ready and replica not in excluded and replica.revision == request.revision
        ]
        return candidates[self._policy.choose(candidates, request, output_tokens)] if candidates else None

    def prefill_source(
        self, target: ReplicaState[C], request: ChoiceRequest, output_tokens: int
    ) -> ReplicaState[C] | None:
        """The prefill replica that should compute a prompt for the target, or None when the target should."""
        sources = [
            replica
            for replica in self._of_model(request.model)
            if replica.ready_source and replica is not target and replica.revision == request.revision
        ]
        tokens = len(request.prompt_token_ids) + output_tokens
        chosen = choose_source(tokens, target, sources, self._disaggregation)
        return sources[chosen] if chosen is not None else None

    def rebalance(self, now: float) -> None:
        """Moves a stream away from each replica that is short of memory or time, when another has free capacity."""
        served: dict[tuple[str, str], list[ReplicaState[C]]] = {}
        for replica in self.replicas:
            if replica.ready:
                served.setdefault((replica.model, replica.revision), []).append(replica)
        for replicas in served.values():
            for hot, _ in self._rebalancer.choose_moves(replicas, now):
                attempt = replicas[hot].newest_started()
                if attempt is not None:
                    attempt.move()

    def _has_ready_peer(self, stalled: ReplicaState[C]) -> bool:
        return any(replica.ready for replica in self._of_model(stalled.model))

    def _of_model(self, name: str) -> Iterator[ReplicaState[C]]:
        return (replica for replica in self.replicas if replica.facts is not None and replica.model == name)

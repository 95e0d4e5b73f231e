"""The set of replicas: which can take work, and what models they serve. Pure."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias

from headrace_proto.control_pb2 import HeardReplica, Member, MemberList, ModelEntry, RouterReport
from headrace_proto.replica_pb2 import REPLICA_STATE_DEAD, REPLICA_STATE_STARTING
from headrace_router.core.errors import DrainedError, ModelNotFoundError, NoReplicaError
from headrace_router.core.policy.interface import ChoiceRequest
from headrace_router.core.policy.rebalance import Rebalancer
from headrace_router.core.prefix_index import PrefixIndex
from headrace_router.core.replica_state import C, ReplicaState
from headrace_router.core.replica_table import ReplicaTable
from headrace_router.core.step_speed import StepMilliseconds


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as /v1/models lists it; length and defaults are unknown until a replica was connected."""

    name: str
    aliases: tuple[str, ...]  # with `*` for any text
    created: int
    max_model_len: int | None = None
    defaults: Mapping[str, float] | None = None  # values of options that requests may omit, by name

    @property
    def names(self) -> tuple[str, ...]:
        """The name and the aliases without `*`."""
        return self.name, *(alias for alias in self.aliases if ANY not in alias)


class ServedModels:
    """The models of a fleet: as the controller listed them last, and as replicas describe them."""

    def __init__(self, started: int) -> None:
        """started: unix seconds; the age of models that no controller lists."""
        self._started = started
        self._listed: dict[str, ServedModel] = {}
        self._named_revisions: dict[str, str] = {}  # where the spec names one
        self._drained: set[str] = set()

    def update(self, entries: Iterable[ModelEntry]) -> None:
        """Replaces the listed models by those of a new member list."""
        entries = list(entries)
        self._named_revisions = {entry.name: entry.revision for entry in entries if entry.revision}
        self._drained = {entry.name for entry in entries if entry.drained}
        self._listed = {
            entry.name: ServedModel(entry.name, tuple(entry.aliases), entry.created or self._started)
            for entry in entries
        }

    def found(self, replicas: Iterable[ReplicaState[Any]]) -> list[ServedModel]:
        """All models, listed or found on a replica."""
        found = dict(self._listed)
        for replica in replicas:
            facts = replica.facts
            if facts is None:
                continue
            known = found.get(replica.model) or ServedModel(replica.model, (), self._started)
            length = min(known.max_model_len or facts.max_model_len, facts.max_model_len)
            found[known.name] = ServedModel(known.name, known.aliases, known.created, length, replica.defaults)
        return sorted(found.values(), key=lambda model: model.name)

    def drained(self, model: str) -> bool:
        """Whether an operator drained all of its replicas."""
        return model in self._drained

    def named_revision(self, model: str) -> str:
        """The one that the spec names; empty if it names none."""
        return self._named_revisions.get(model, "")

    def revision(self, model: str, ready: Mapping[str, Sequence[ReplicaState[Any]]]) -> str:
        """The one that the spec names; if it names none, or none of it is ready, that of the most ready replicas.

        ready: the ready replicas of each revision. Of those with as many the one with the newest replica is chosen.
        """
        named = self.named_revision(model)
        if named in ready or not ready:
            return named
        most = max(map(len, ready.values()))
        equal = [revision for revision, replicas in ready.items() if len(replicas) == most]
        if len(equal) == 1:
            return equal[0]
        return max(equal, key=lambda revision: max(replica.identity.generation for replica in ready[revision]))


ANY = "*"  # in aliases
LATEST = ":latest"  # the tag that Ollama's clients add to names without one
PAUSE_SECONDS = 1.0  # between two calls of `maintain`: longer ones are pauses of this process
EXPIRED_BLOCKS = 4_096  # that were expected, in each call of `expire`: some milliseconds
SWEPT_SEGMENTS = 8  # segments of the prefix index, in each call of `maintain`: about a millisecond
PEERS = 32  # that a replica's speed is compared with: the median of more would be the same
LEAST_COMPARISONS = 64  # speeds compared in a call of `maintain`, at least; the others follow in the next calls
COMPARISON_CALLS = 8  # in which all replicas are compared: less than the second that a measurement takes
CHECKED_SECONDS = 1.0  # without a step: links and replicas that step more often are not looked at
ARRIVALS = 4  # streams that one replica continues at a time, until they have tokens

Serving: TypeAlias = Mapping[tuple[str, str], Sequence[ReplicaState[C]]]  # by model and revision


class Link(Protocol[C]):
    """Keeps a stream open to one replica, and its state up to date."""

    @property
    def state(self) -> ReplicaState[C]: ...

    def close(self) -> None:
        """Starts to close the stream, which ends every attempt on it; returns at once."""

    def check_stall(self) -> None:
        """Ends the stream, and opens another one, if the replica has made no step for too long; returns at once.

        Called several times a second while there was no step for CHECKED_SECONDS.
        """


def _fits(name: str, pattern: str) -> bool:
    """Whether the name is the pattern with some text for each `*`."""
    first, *inner, last = pattern.split(ANY)
    place, end = len(first), len(name) - len(last)
    if place > end or not (name.startswith(first) and name.endswith(last)):
        return False
    for part in inner:
        found = name.find(part, place, end)
        if found < 0:
            return False
        place = found + len(part)
    return True


class Fleet(Generic[C]):
    """Keeps one link per member."""

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
        self._clock = clock
        self._maintained: float | None = None
        self._expired = 0  # place of the replica of which expected blocks have expired last
        self._turn = 0  # rotates the peers in a comparison
        self._ready: set[int] = set()  # links that were ready at the last `rebalance`
        self._links: dict[tuple[str, str, int], Link[C]] = {}  # in the order of the table
        self._unlisted: dict[tuple[str, str, int], Link[C]] = {}  # those of them to replicas that are no members
        self.table: ReplicaTable[C] = ReplicaTable()
        self._models = ServedModels(started)
        self._found: tuple[int, Sequence[ServedModel]] | None = None  # with the table's descriptions of that time
        self._version: tuple[bytes, int] = (b"", 0)
        self._serves_elsewhere = False  # a member of the last list may serve
        self._joined = False

    @property
    def replicas(self) -> list[ReplicaState[C]]:
        return self.table.replicas

    def update(self, members: MemberList) -> None:
        """Applies a member list of the controller. An older one of the same controller start is dropped."""
        epoch, version = self._version
        if members.epoch and members.epoch == epoch and members.version < version:
            return
        self._version = members.epoch, members.version
        listed: dict[tuple[str, str, int], Member] = {}
        kept: set[tuple[str, int]] = set()  # which the controller knows by name only: it has just started
        self._serves_elsewhere = False
        for member in members.members:
            if not member.address:
                kept.add((member.identity.replica_id, member.identity.generation))
            if member.state in (REPLICA_STATE_DEAD, REPLICA_STATE_STARTING):
                continue
            self._serves_elsewhere = True
            if not member.address:
                continue
            listed[member.address, member.identity.replica_id, member.identity.generation] = member
        for key, link in self._links.items():
            if key[1:] not in kept:
                link.state.list_as(listed.pop(key, None))
        self._unlisted = {key: link for key, link in self._links.items() if link.state.listing is None}
        for key, member in listed.items():
            self._links[key] = self._open_link(member)
        self.table.set_replicas(link.state for link in self._links.values())
        self._models.update(members.models)
        self._found = None
        self.sweep()

    def report(self, router_id: str) -> RouterReport:
        """From which replicas this router receives messages, for the controller."""
        replicas = []
        for replica in self.replicas:  # by their listed names, not by what they claim to be
            identity = replica.listing.identity if replica.listing is not None else replica.identity
            name = identity.replica_id or replica.address
            replicas.append(HeardReplica(replica_id=name, generation=identity.generation, heard=replica.heard))
        return RouterReport(router_id=router_id, replicas=replicas)

    def maintain(self) -> None:
        """Called several times a second: finds slow replicas, and moves the attempts of a stalled one to others."""
        now = self._clock()
        pause = now - self._maintained if self._maintained is not None else 0.0
        self._maintained = now
        if pause > PAUSE_SECONDS:  # all seem stalled until their frames are read
            for replica in self.replicas:
                replica.resume_after(pause)
        self.table.refresh()
        links, replicas = list(self._links.values()), self.replicas
        still = self.table.without_step(now, CHECKED_SECONDS)
        for place in still:
            links[place].check_stall()
        serving = self._ready_by_revision()
        self.expire()
        self._compare_speeds(serving)
        for replica in [replicas[place] for place in still]:
            served = (replica.model, replica.revision) in serving
            if replica.attempts and replica.connected and replica.stalled and served:
                replica.end_attempts()
        self.index.sweep(SWEPT_SEGMENTS)
        self.sweep()

    def expire(self) -> bool:
        """Forgets expected blocks of attempts that ended some time ago, of some replicas: whether there may be more.

        What is left follows with the next call.
        """
        replicas, now = self.replicas, self._clock()
        left = EXPIRED_BLOCKS
        for _ in replicas:
            self._expired = (self._expired + 1) % len(replicas)
            blocks = replicas[self._expired].blocks
            left = left if blocks is None else blocks.expire(now, left)
            if left <= 0:
                self._expired -= 1  # it may have more
                return True
        return False

    def sweep(self) -> None:
        """Closes idle links to unlisted replicas."""
        idle = [key for key, link in self._unlisted.items() if not link.state.attempts]  # others may finish
        if not idle:
            return
        closing = [self._links.pop(key) for key in idle]
        for key in idle:
            del self._unlisted[key]
        self.table.set_replicas(link.state for link in self._links.values())
        for link in closing:
            self._close(link)

    def close(self) -> None:
        """Starts to close every link, which ends every attempt."""
        links = list(self._links.values())
        self._links.clear()
        self._unlisted.clear()
        self.table.set_replicas(())
        for link in links:
            self._close(link)

    def _close(self, link: Link[C]) -> None:
        link.close()
        if link.state.blocks is not None:
            link.state.blocks.close()

    @property
    def joined(self) -> bool:
        """Whether a member list was applied and, if replicas in it serve, one of them was ready here, once.

        A new router is not to get requests that others can answer, and it cannot yet.
        """
        self._joined |= self._version[1] > 0 and (self.ready or not self._serves_elsewhere)
        return self._joined

    @property
    def ready(self) -> bool:
        """Whether any model has a ready replica: a model without one refuses its own requests only."""
        return any(replica.ready for replica in self.replicas)

    def model_ready(self, name: str) -> bool:
        """Whether the model with this name or alias has a ready replica; false for an unknown one."""
        known = self._named(name)
        return known is not None and any(replica.ready for replica in self.of_model(known.name))

    def models(self) -> Sequence[ServedModel]:
        """All models, listed by the controller or found on a replica."""
        self.table.refresh()
        if self._found is None or self._found[0] != self.table.descriptions:
            self._found = self.table.descriptions, self._models.found(self.replicas)
        return self._found[1]

    def model(self, name: str) -> ServedModel:
        """The model with this name or alias. Raises ModelNotFoundError."""
        found = self._named(name) or self._named(name.removesuffix(LATEST))
        if found is not None:
            return found
        shown = name if len(name) <= 100 else name[:99] + "…"
        raise ModelNotFoundError(
            f"The model '{shown}' does not exist; GET /v1/models lists those that do.", param="model"
        )

    def _named(self, name: str) -> ServedModel | None:
        """Of several patterns that fit, the longest counts."""
        models = self.models()
        exact = next((model for model in models if name in model.names), None)
        if exact is not None:
            return exact
        fitting = [
            (len(alias), model) for model in models for alias in model.aliases if ANY in alias and _fits(name, alias)
        ]
        return max(fitting, key=lambda pair: pair[0])[1] if fitting else None

    def card(self, name: str) -> C:
        """The card of the revision that new requests use. Raises ModelNotFoundError, NoReplicaError or DrainedError."""
        model = self.model(name)
        ready = self.table.ready_of(model.name, self._clock())
        revision = self._models.revision(model.name, ready)
        card = next((replica.card for replica in ready.get(revision, ())), None)
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
        self.table.refresh()
        served = self.table.ready_rows(self._clock())
        ready = {id(replica) for rows in served.values() for replica in self.table.at(rows)}
        if self._ready - ready:
            self._rebalancer.replica_lost(now)
        self._ready = ready
        for rows in served.values():
            replicas = self.table.at(rows)
            for hot, cold in self._rebalancer.choose_moves(self.table.view(rows), now):
                target, attempt = replicas[cold], replicas[hot].newest_started()
                if attempt is not None and self._takes_streams(target):
                    attempt.move(target)

    def _takes_streams(self, replica: ReplicaState[C]) -> bool:
        return not replica.speed.slow and len(replica.arriving) < ARRIVALS

    def _compare_speeds(self, serving: Serving[C]) -> None:
        """Compares the steps of some replicas with those of their peers."""
        comparisons = max(LEAST_COMPARISONS, len(self.replicas) // COMPARISON_CALLS)
        complete = [replica for replica in self.replicas if replica.speed.complete and replica.facts is not None]
        peers: dict[tuple[str, str], list[tuple[ReplicaState[C], StepMilliseconds]]] = {}
        for replica in complete[:comparisons]:
            key = replica.model, replica.revision
            if key not in peers:
                peers[key] = self._peers(serving.get(key, ()))
            replica.evaluate_speed([cost for other, cost in peers[key] if other is not replica])

    def _peers(self, serving: Sequence[ReplicaState[C]]) -> list[tuple[ReplicaState[C], StepMilliseconds]]:
        """With their step models; of many replicas a part that is spread over the list."""
        count = len(serving)
        if count > PEERS + 1:
            self._turn += 1
            serving = [serving[(self._turn + part * count // (PEERS + 1)) % count] for part in range(PEERS + 1)]
        return [
            (replica, StepMilliseconds.of(replica.load.step_model)) for replica in serving if not replica.speed.slow
        ]

    def _ready_by_revision(self) -> Serving[C]:
        """All replicas that take new requests, by model and revision."""
        self.table.refresh()
        return self.table.ready(self._clock())

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

"""Which replicas there are, which of them can take work, and what models they serve."""

import asyncio
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

import structlog

from headrace_proto.control_pb2 import Member, MemberList
from headrace_proto.replica_pb2 import REPLICA_STATE_DEAD, REPLICA_STATE_STARTING
from headrace_router.errors import ModelNotFoundError, NoReplicaError
from headrace_router.model_card import ModelCard
from headrace_router.policy import Policy, Work
from headrace_router.policy.disaggregate import Mode, Prompt, choose_source
from headrace_router.policy.rebalance import Rebalancer
from headrace_router.replica_link import ReplicaLink

log = structlog.get_logger("headrace.router.fleet")


STALLED_LOOKS = 3  # in a row, until what runs on a stalled replica goes elsewhere


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as /v1/models tells it; the length is unknown until a replica was connected."""

    name: str
    aliases: tuple[str, ...]
    created: int
    max_model_len: int | None


class Fleet:
    """Keeps one link per member. All methods run on the event loop."""

    def __init__(
        self, make_link: Callable[[Member], ReplicaLink], policy: Policy, started: int, *, disaggregation: Mode = "auto"
    ) -> None:
        self._make_link = make_link
        self._policy = policy
        self._disaggregation: Mode = disaggregation
        self._rebalancer = Rebalancer()
        self._started = started  # unix seconds
        self._links: dict[tuple[str, str, int], ReplicaLink] = {}
        self._known: dict[str, ServedModel] = {}  # as the controller names them
        self._version: tuple[bytes, int] = (b"", 0)
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def links(self) -> Collection[ReplicaLink]:
        return self._links.values()

    def update(self, members: MemberList) -> None:
        """A list from the controller. An older one of the same controller start is dropped."""
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
            if key in self._links:
                self._links[key].listed(member)
            else:
                self._links[key] = self._make_link(member)
                self._links[key].start()
        for key, link in self._links.items():
            if key not in listed:
                link.retire()
        self._known = {
            entry.name: ServedModel(entry.name, tuple(entry.aliases), entry.created or self._started, None)
            for entry in members.models
        }
        self.sweep()

    def sweep(self) -> None:
        """Closes links that left the list and are idle; moves what waits on a stalled replica to another."""
        for link in self._links.values():
            if link.connected and link.stalled and link.attempts:
                link.looks_stalled += 1
                # Not at first sight: after a pause of this process everybody seems stalled until frames are read.
                if link.looks_stalled > STALLED_LOOKS and self._ready_beside(link):
                    link.give_up()
            else:
                link.looks_stalled = 0
        for key, link in list(self._links.items()):
            if link.retired_and_idle:
                del self._links[key]
                task = asyncio.create_task(link.close())
                self._closing.add(task)
                task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        links = list(self._links.values())
        self._links.clear()
        await asyncio.gather(*(link.close() for link in links), *self._closing, return_exceptions=True)

    @property
    def ready(self) -> bool:
        """Whether every model that the cluster names (or any, when none is named) has a ready replica."""
        served = {link.card.model for link in self._links.values() if link.ready and link.card}
        return bool(served) and served >= set(self._known)

    def models(self) -> list[ServedModel]:
        """All models, named by the controller or found on a replica."""
        found = dict(self._known)
        for link in self._links.values():
            card = link.card
            if card is None:
                continue
            known = found.get(card.model) or ServedModel(card.model, (), self._started, None)
            length = min(known.max_model_len or card.max_model_len, card.max_model_len)
            found[card.model] = ServedModel(known.name, known.aliases, known.created, length)
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

    def card(self, name: str) -> ModelCard:
        """The card of the model's newest ready revision. Raises ModelNotFoundError or NoReplicaError."""
        model = self.model(name)
        newest: ReplicaLink | None = None
        for link in self._of_model(model.name):
            if link.ready and (newest is None or link.identity.generation > newest.identity.generation):
                newest = link
        if newest is None or newest.card is None:
            raise NoReplicaError(f"No replica of '{model.name}' is ready; try again in a moment.")
        return newest.card

    def place(self, card: ModelCard, work: Work, excluded: Collection[ReplicaLink]) -> ReplicaLink | None:
        """A ready replica of the card's model and revision that is not excluded, or None."""
        candidates = [
            link
            for link in self._of_model(card.model)
            if link.ready and link not in excluded and link.card is not None and link.card.revision == card.revision
        ]
        return candidates[self._policy.choose(candidates, work)] if candidates else None

    def source(self, target: ReplicaLink, card: ModelCard, work: Work) -> ReplicaLink | None:
        """The prefill replica that should compute a prompt for the target, or None when the target should."""
        sources = [
            link
            for link in self._of_model(card.model)
            if link.ready_source and link is not target and link.card and link.card.revision == card.revision
        ]
        prompt = Prompt(len(work.prompt_token_ids) + work.output_tokens_so_far)
        chosen = choose_source(prompt, target, sources, self._disaggregation)
        return sources[chosen] if chosen is not None else None

    def rebalance(self, now: float) -> None:
        """Has a stream leave each replica that is short of memory or time, when another one has plenty."""
        served: dict[tuple[str, str], list[ReplicaLink]] = {}
        for link in self._links.values():
            if link.ready and link.card is not None:
                served.setdefault((link.card.model, link.card.revision), []).append(link)
        for links in served.values():
            for hot, _ in self._rebalancer.look(links, now):
                attempt = links[hot].newest_started()
                if attempt is not None:
                    attempt.move()

    def _ready_beside(self, stalled: ReplicaLink) -> bool:
        card = stalled.card
        return card is not None and any(link.ready for link in self._of_model(card.model))

    def _of_model(self, name: str) -> Iterator[ReplicaLink]:
        return (link for link in self._links.values() if link.card is not None and link.card.model == name)

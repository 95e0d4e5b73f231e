"""The models of a fleet: as the controller lists them, and as replicas describe them. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace_proto.control_pb2 import ModelEntry
from headrace_router.core.replica_state import ReplicaState


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model as /v1/models lists it; length and defaults are unknown until a replica was connected."""

    name: str
    aliases: tuple[str, ...]
    created: int
    max_model_len: int | None = None
    defaults: Mapping[str, float] | None = None  # of options that requests may omit, by name


class ServedModels:
    """What the controller listed last."""

    def __init__(self, started: int) -> None:
        """started: unix seconds; the age of models that no controller lists."""
        self._started = started
        self._listed: dict[str, ServedModel] = {}
        self._named_revisions: dict[str, str] = {}  # where the spec names one
        self._drained: set[str] = set()

    def update(self, entries: Iterable[ModelEntry]) -> None:
        """Of a new member list."""
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

"""All replicas of a fleet as columns, kept current: only those that have changed are read again. Pure."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Generic, overload

import numpy as np
from numpy.typing import NDArray

from headrace_proto.replica_pb2 import ModelFacts
from headrace_router.core.policy.interface import COLUMNS, View, row
from headrace_router.core.prefix_index import PrefixIndex
from headrace_router.core.replica_blocks import HashScheme, PromptBlocks
from headrace_router.core.replica_state import C, ReplicaState

NONE = -1
SPARE_NAMES = 64  # models and revisions that no replica has any more, beside twice as many as replicas
READ_TOGETHER = 8  # changed replicas that are read after a frame: a decision finds fewer

Rows = NDArray[np.int64]

# Columns of this table after those of a View: by the attribute of a replica, and by a number that the table gives.
_OF_REPLICA = {
    "takes": "takes_work",
    "moved_at": "heartbeat.at",
    "stall_limit": "stall_seconds",
    "slow": "speed.slow",
    "arrivals": "arrivals",
}


def _model(table: "ReplicaTable[Any]", replica: ReplicaState[Any]) -> int:
    return table.models.setdefault((replica.model, replica.revision), len(table.models))


def _scheme(table: "ReplicaTable[Any]", replica: ReplicaState[Any]) -> int:
    if replica.scheme is None or replica.blocks is None:
        return NONE
    return table.hash_schemes.setdefault(replica.scheme, len(table.hash_schemes))


def _slot(_: object, replica: ReplicaState[Any]) -> int:
    return replica.blocks.slot if replica.blocks is not None else 0


def _offloaded_slot(_: object, replica: ReplicaState[Any]) -> int:
    slot = replica.blocks.offloaded_slot if replica.blocks is not None else None
    return NONE if slot is None else slot


_OF_TABLE = {
    "model": _model,
    "scheme": _scheme,  # number of the hash scheme; NONE without
    "slot": _slot,  # in the prefix index
    "offloaded_slot": _offloaded_slot,  # the same, of blocks in host memory or on disk; NONE without
}
_AT = COLUMNS | {name: len(COLUMNS) + place for place, name in enumerate([*_OF_REPLICA, *_OF_TABLE])}
_read_replica, _read_numbers = attrgetter(*_OF_REPLICA.values()), tuple(_OF_TABLE.values())


class _Chosen(Sequence[ReplicaState[C]]):
    """Some replicas, of which few are read."""

    def __init__(self, replicas: list[ReplicaState[C]], rows: Rows) -> None:
        self._replicas = replicas
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[ReplicaState[C]]:
        return map(self._replicas.__getitem__, self._rows.tolist())

    @overload
    def __getitem__(self, place: int) -> ReplicaState[C]: ...

    @overload
    def __getitem__(self, place: slice) -> Sequence[ReplicaState[C]]: ...

    def __getitem__(self, place: int | slice) -> ReplicaState[C] | Sequence[ReplicaState[C]]:
        if isinstance(place, slice):
            return _Chosen(self._replicas, self._rows[place])
        return self._replicas[int(self._rows[place])]


class ReplicaTable(Generic[C]):
    """One row per replica, in the order of `replicas`."""

    def __init__(self) -> None:
        self.replicas: list[ReplicaState[C]] = []
        self.descriptions = 0  # grows when a replica has described itself, or the replicas are others
        self.models: dict[tuple[str, str], int] = {}  # the number of each model's revision
        self.hash_schemes: dict[HashScheme, int] = {}
        self._data = np.zeros((len(_AT), 0))
        self._changed: list[int] = []  # places of the replicas that have changed since they were read
        self._facts: list[ModelFacts | None] = []  # facts of each replica, when it was read

    def set_replicas(self, replicas: Iterable[ReplicaState[C]]) -> None:
        """Those of the fleet, after it has changed."""
        self.replicas = list(replicas)
        self._data = np.zeros((len(_AT), len(self.replicas)))
        self.descriptions += 1
        self.models.clear()
        self.hash_schemes.clear()
        self._changed = []  # replicas that are gone still have the one of before
        self._facts = [None] * len(self.replicas)
        for place, replica in enumerate(self.replicas):
            replica.follow(partial(self._changed.append, place), self._received)
        self.refresh()

    def refresh(self) -> None:
        """Reads the replicas that have changed since the last call."""
        changed = self._changed
        if not changed:
            return
        rows = []
        for place in changed:
            replica = self.replicas[place]
            replica.reset_changed()
            rows.append(self._row(replica))
            if replica.facts is not self._facts[place]:
                self._facts[place] = replica.facts
                self.descriptions += 1
        self._data[:, changed] = np.array(rows, np.float64).T
        changed.clear()
        # Most are of earlier descriptions then.
        if max(len(self.models), len(self.hash_schemes)) > 2 * len(self.replicas) + SPARE_NAMES:
            self.models.clear()
            self.hash_schemes.clear()
            self._data = np.array([self._row(replica) for replica in self.replicas], np.float64).T

    def _received(self) -> None:
        """After a frame of any replica: a router of many has read most of them when it makes a decision."""
        if len(self._changed) >= READ_TOGETHER:
            self.refresh()

    def _row(self, replica: ReplicaState[C]) -> tuple[float, ...]:
        return *row(replica), *_read_replica(replica), *[read(self, replica) for read in _read_numbers]

    def usable(self, model: str, revision: str, now: float, *, prefill: bool) -> Rows:
        """Ready replicas of a model's revision: those that decode, or those that compute prompts for others."""
        known = self.models.get((model, revision))
        if known is None:
            return np.zeros(0, np.int64)
        if prefill and not self._data[_AT["prefill"]].any():
            return np.zeros(0, np.int64)
        return np.flatnonzero(self._ready(now, prefill=prefill) & (self._data[_AT["model"]] == known))

    def _ready(self, now: float, *, prefill: bool) -> NDArray[np.bool_]:
        data = self._data
        ready: NDArray[np.bool_] = (data[_AT["prefill"]] == prefill) & (data[_AT["takes"]] > 0)
        ready &= now - data[_AT["moved_at"]] <= data[_AT["stall_limit"]]
        return ready

    def ready(self, now: float) -> dict[tuple[str, str], "Sequence[ReplicaState[C]]"]:
        """Ready replicas that decode, by model and revision; only of those that have any."""
        return {key: self.at(rows) for key, rows in self.ready_rows(now).items()}

    def ready_rows(self, now: float) -> dict[tuple[str, str], Rows]:
        """The same, as rows of this table."""
        rows = np.flatnonzero(self._ready(now, prefill=False))
        numbers = self.column("model", rows).astype(np.int64)
        order = numbers.argsort(kind="stable")
        keys = list(self.models)
        groups = np.split(rows[order], np.flatnonzero(np.diff(numbers[order])) + 1) if len(rows) else []
        return {keys[int(self._data[_AT["model"], group[0]])]: group for group in groups}

    def ready_of(self, model: str, now: float) -> dict[str, "Sequence[ReplicaState[C]]"]:
        """Those of one model, by revision."""
        ready = self._ready(now, prefill=False)
        found = {
            revision: np.flatnonzero(ready & (self._data[_AT["model"]] == number))
            for (name, revision), number in self.models.items()
            if name == model
        }
        return {revision: self.at(rows) for revision, rows in found.items() if len(rows)}

    def without_step(self, now: float, seconds: float) -> "Sequence[int]":
        """Places of the replicas that have made no step for so long."""
        places: list[int] = np.flatnonzero(now - self._data[_AT["moved_at"]] >= seconds).tolist()
        return places

    def column(self, name: str, rows: Rows) -> NDArray[np.float64]:
        """One column, for these rows."""
        values: NDArray[np.float64] = self._data[_AT[name], rows]
        return values

    def schemes(self, rows: Rows) -> list[HashScheme]:
        """The hash schemes of these replicas."""
        column = self.column("scheme", rows)
        return [scheme for scheme, number in self.hash_schemes.items() if (column == number).any()]

    def of_slots(self, values: Rows, scheme: HashScheme, rows: Rows) -> Rows:
        """Values by slot of the prefix index, for these replicas; 0 for those with another scheme."""
        slots = self.column("slot", rows).astype(np.int64)
        return np.where(self.column("scheme", rows) == self.hash_schemes.get(scheme, NONE - 1), values[slots], 0)

    def offloaded(self, blocks: PromptBlocks, scheme: HashScheme, index: PrefixIndex, rows: Rows, cached: Rows) -> Rows:
        """How many of a prompt's `cached` tokens are only in host memory or on disk, for each of these replicas."""
        slots = self.column("offloaded_slot", rows).astype(np.int64)
        has = (slots != NONE) & (self.column("scheme", rows) == self.hash_schemes.get(scheme, NONE - 1))
        tokens = np.zeros(len(rows), np.int64)
        if has.any():
            lengths = np.zeros(index.slots, np.int64)
            lengths[slots[has]] = cached[has]
            tokens[has] = blocks.offloaded_tokens(index, lengths)[slots[has]]
        return tokens

    def view(self, rows: Rows) -> View:
        """For a policy, valid until the next `refresh`: of all replicas in order it is not a copy."""
        data = self._data[: len(COLUMNS)]
        every = len(rows) == len(self.replicas) and bool((rows[1:] > rows[:-1]).all())
        return View(self.at(rows), data if every else data.take(rows, axis=1))

    def at(self, rows: Rows) -> "Sequence[ReplicaState[C]]":
        return _Chosen(self.replicas, rows)

"""What operators said at run time, and what must not be used twice: kept in Ray's GCS for the next controller.

A word overrides the spec until the spec's own value changes. All else is seen: what runs says what it is.
"""

from typing import Any

import msgspec

from headrace_cluster.core.revisions import ResolvedRevision


class RoleWord(msgspec.Struct, frozen=True):
    """The role of a replica."""

    role: str
    spec: str  # the role in the spec at that time


class Roll(msgspec.Struct, frozen=True):
    """That a replica is built again, as it is."""

    number: int  # a part of the digest that is wanted
    seconds: float  # for requests in flight
    of: bytes  # the digest of the replica without rolls: for others the two other values do not count
    allow_gap: bool = False  # it may end before its next build is ready


class Changed(msgspec.Struct, frozen=True):
    """Another value of the spec than it has itself."""

    value: Any
    spec: Any  # its value in the spec at that time


class UsedSpec(msgspec.Struct, frozen=True):
    """The models of the spec that a controller uses."""

    models: list[dict[str, Any]]
    origin: str  # its process and its file, for people


class Words(msgspec.Struct, kw_only=True):
    """The record of one cluster, changed in place by its one controller. Dictionaries are by replica id."""

    created: int = 0  # unix seconds: the date of the models in /v1/models
    served: bool = False  # a replica was ready: from now on one that does not start does not end the cluster
    revisions: dict[str, ResolvedRevision] = {}  # by model
    generations: dict[str, int] = {}  # the newest of each replica: no number is used again
    drained: dict[str, float] = {}  # seconds for requests in flight
    roles: dict[str, RoleWord] = {}
    rolls: dict[str, Roll] = {}
    models: Changed | None = None  # all of them, as data; its `spec` is their digest
    settings: dict[str, dict[str, Changed]] = {}  # by model and key
    scales: dict[str, Changed] = {}  # numbers of replicas, by 'MODEL' or 'MODEL.POOL'
    spec: UsedSpec | None = None
    lost: int = 0  # unix seconds: when it was found that an earlier record is gone; 0 = it is not

    def update(self, newer: "Words") -> None:
        """What the controller before has written since this was read."""
        self.created, self.served, self.lost = newer.created, newer.served, newer.lost
        self.drained, self.roles, self.rolls = newer.drained, newer.roles, newer.rolls
        self.models, self.settings, self.scales = newer.models, newer.settings, newer.scales
        for replica_id, generation in newer.generations.items():
            self.generations[replica_id] = max(generation, self.generations.get(replica_id, 0))


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right of one controller to act: the newest one has it."""

    id: str  # random, of one process
    epoch: int = 1  # one more than that of the controller before

"""What the planner is told of the cluster in Ray, and the steps that it names."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.spec.model_spec import ModelSpec
from headrace_proto.role import Role


@dataclass(frozen=True, slots=True)
class PlaceBuild:
    """Request a place for a build."""

    name: ReplicaName
    model: ModelSpec


@dataclass(frozen=True, slots=True)
class CreateRanks:
    """Create the ranks of a build that has a place."""

    name: ReplicaName
    model: ModelSpec
    role: Role
    digest: bytes


@dataclass(frozen=True, slots=True)
class SendSecret:
    """Give a rank the cluster's secret: the first time, it starts."""

    name: ReplicaName
    rank: int


@dataclass(frozen=True, slots=True)
class SetRole:
    """Give a build another role, in place."""

    name: ReplicaName
    role: Role


@dataclass(frozen=True, slots=True)
class DrainBuild:
    """Make a build refuse requests; those in flight have some seconds."""

    name: ReplicaName
    seconds: float


@dataclass(frozen=True, slots=True)
class EndBuild:
    """End a build's ranks, and free its place. gently: its engine stops in order."""

    name: ReplicaName
    gently: bool


Action = PlaceBuild | CreateRanks | SendSecret | SetRole | DrainBuild | EndBuild


@dataclass(frozen=True, slots=True)
class Seen:
    """What Ray has of this cluster at one time."""

    groups: Mapping[ReplicaName, bool]  # placement groups: whether they have a place
    ranks: Collection[tuple[ReplicaName, int]]  # actors that are alive
    draining: Mapping[str, float] = field(default_factory=dict)  # nodes that Ray will end, and in how many seconds

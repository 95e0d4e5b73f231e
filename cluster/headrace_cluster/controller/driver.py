"""What the controller asks of whatever runs ranks. Ray is one such thing; tests bring their own."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from headrace_cluster.controller.reconciler import DesiredReplica
from headrace_cluster.naming import ReplicaName
from headrace_cluster.pools import Role
from headrace_cluster.rank_config import ProfileOutcome
from headrace_cluster.spec import ModelSpec
from headrace_proto.errors import HeadraceError
from headrace_worker.config import ReplicaStarted

STOP_SECONDS = 5.0


class StartFailedError(HeadraceError):
    """A replica did not become ready.

    `final`: it would not the next time either. `secondary`: another rank knows why.
    """

    def __init__(self, sentence: str, *, final: bool, secondary: bool = False) -> None:
        super().__init__(sentence)
        self.final = final
        self.secondary = secondary


@dataclass(frozen=True, slots=True)
class RankFacts:
    """Where one rank runs."""

    rank: int
    pid: int
    node: str
    device: str = ""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the slowest rank is: a sentence and 0..1."""

    stage: str
    fraction: float


@dataclass(frozen=True, slots=True)
class AdoptedBuild:
    """A build that is up, though this controller did not start it."""

    name: ReplicaName
    ranks: list[RankFacts]
    started: ReplicaStarted
    role: Role
    draining: bool


@dataclass(frozen=True, slots=True)
class Inheritance:
    """What an earlier controller left."""

    builds: list[AdoptedBuild] = field(default_factory=list)
    generations: dict[str, int] = field(default_factory=dict)  # the newest that was seen of each replica, up or not


class ReplicaDriver(Protocol):
    """Builds, watches and ends replicas by name. All methods may be called while others wait."""

    async def launch(self, name: ReplicaName, model: ModelSpec, role: Role) -> list[RankFacts]:
        """Places the ranks and creates their processes. Raises PlacementError, StartFailedError."""
        ...

    async def adopt(self, replicas: Iterable[DesiredReplica]) -> Inheritance:
        """Takes over what an earlier controller left: of each replica the newest build that is up and as wanted.

        Everything else of this cluster is ended, by name. Called before anything is launched.
        """
        ...

    async def start(self, name: ReplicaName) -> ReplicaStarted:
        """Returns once the replica is ready to serve. Raises StartFailedError."""
        ...

    async def progress(self, name: ReplicaName) -> Progress | None:
        """How far `start` is; None when it cannot be told."""
        ...

    async def died(self, name: ReplicaName) -> str:
        """Returns when the first rank of a started replica ends, with the cause in a sentence."""
        ...

    async def profile(self, name: ReplicaName, steps: int, seconds: float) -> list[ProfileOutcome]:
        """Has every rank record its next steps; what came of it, in rank order. Never raises."""
        ...

    async def set_role(self, name: ReplicaName, role: Role) -> None:
        """Tells a replica its new role; nothing that runs there notices. Raises RoleError when it does not hear."""
        ...

    async def drain(self, name: ReplicaName) -> None:
        """Tells a replica to take no new requests; those in flight go on. Never raises."""
        ...

    async def stop(self, name: ReplicaName, seconds: float = STOP_SECONDS) -> None:
        """Ends all ranks, in order if they manage in so many seconds, and gives their place back.

        Idempotent, never raises.
        """
        ...

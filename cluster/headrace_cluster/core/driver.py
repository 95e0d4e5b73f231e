"""The interface between the controller and what runs ranks: Ray in production, fakes in tests."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from headrace_cluster.core.actions import Seen
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.rank_config import ProfileOutcome, RankReport
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_cluster.spec.model_spec import ModelSpec
from headrace_proto.role import Role


@dataclass(frozen=True, slots=True)
class RankFacts:
    """Where one rank runs."""

    rank: int
    pid: int
    node: str
    device: str = ""


class RankDriver(Protocol):
    """Every method may be called while others are pending, and may raise: the call is repeated.

    A call whose effect is there already changes nothing.
    """

    spec: ClusterSpec  # with the words of operators

    def digest(self, replica_id: str, model: ModelSpec, roll: int) -> bytes:
        """The digest of a replica as it is to be; equal to what its ranks report. roll: the number of its last roll."""
        ...

    async def look(self) -> Seen:
        """What there is of this cluster."""
        ...

    async def place(self, name: ReplicaName, model: ModelSpec) -> None:
        """Requests a place for a build."""
        ...

    async def waiting_reason(self, model: ModelSpec) -> str:
        """Why a replica of this model has no place now, in a sentence."""
        ...

    async def fill(self, name: ReplicaName, model: ModelSpec, role: Role, digest: bytes) -> None:
        """Creates the ranks of a build that has a place; they start by themselves once they have the secret."""
        ...

    async def watch(self, name: ReplicaName, rank: int, receive: Callable[[RankReport], None]) -> None:
        """Calls `receive` with each report of a rank, and returns when it has ended."""
        ...

    async def send_secret(self, name: ReplicaName, rank: int) -> None:
        """Gives a rank the values that are valid now."""
        ...

    async def set_role(self, name: ReplicaName, role: Role) -> None:
        """Gives a replica another role; its requests are not affected."""
        ...

    async def drain(self, name: ReplicaName, seconds: float) -> None:
        """Stops a replica from accepting requests; those in flight continue, and have so many seconds."""
        ...

    async def profile(self, name: ReplicaName, steps: int, seconds: float) -> list[ProfileOutcome]:
        """Records the next steps of every rank; returns the outcomes in rank order. Never raises."""
        ...

    async def end(self, name: ReplicaName, seconds: float) -> None:
        """Ends all ranks, in order if they stop within `seconds`, and releases their place."""
        ...

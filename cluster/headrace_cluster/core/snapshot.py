"""State that a controller leaves to the next one; it is kept in Ray's GCS."""

import msgspec

from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.rank_config import RankReport
from headrace_cluster.core.revisions import ResolvedRevision


class ReplicaSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """One replica id. Includes what an operator changed at run time."""

    generation: int
    role: str  # prefill | decode | both
    role_number: int = 0  # of the decision about its role
    held: bool  # an operator drained it
    built: int = 0  # generation of its newest build, which may have started beside this one
    rolling: bool = False  # it ends in order to be built again
    surging: bool = False  # its next build starts beside it
    drain_seconds: float | None = None  # remaining for its requests in flight, while it is drained
    leaving_seconds: float | None = None  # the same of the build before, from which this one has taken over
    ever_ready: bool = False  # if true, a build that does not start does not end the cluster


class BuildSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A build that is up, for a controller to which its ranks do not reply."""

    replica_id: str
    generation: int
    ranks: list[RankReport]  # in rank order; role and drain as the controller knew them


class ControllerSnapshot(msgspec.Struct, frozen=True, kw_only=True):
    """For the next controller of the same cluster. The first controller has none."""

    created: int  # unix seconds: the date of the models in /v1/models
    replicas: dict[str, ReplicaSnapshot] = {}
    builds: list[BuildSnapshot] = []

    @property
    def reports(self) -> dict[tuple[ReplicaName, int], RankReport]:
        """The recorded report of each rank, by build and rank."""
        return {
            (ReplicaName(build.replica_id, build.generation), rank): report
            for build in self.builds
            for rank, report in enumerate(build.ranks)
        }


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """The right of one controller to act: the newest one has it."""

    id: str  # random, of one process
    epoch: int = 1  # one more than that of the controller before
    revisions: dict[str, ResolvedRevision] = {}  # by model

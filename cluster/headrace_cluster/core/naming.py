"""Names in Ray: one namespace per cluster, one name per actor and placement group, by which all can be found again."""

import re
from dataclasses import dataclass

_RANK = re.compile(r"(?P<replica>.+)\.g(?P<generation>\d+)\.r(?P<rank>\d+)")
_GROUP = re.compile(r"(?P<cluster>[^/]+)/(?P<replica>.+)\.g(?P<generation>\d+)")


@dataclass(frozen=True, slots=True, order=True)
class ReplicaName:
    """One build of one replica; the generation counts its builds."""

    replica_id: str
    generation: int

    def rank(self, rank: int) -> str:
        """The actor of one rank, as Ray's dashboard shows it: 'smollm2-0.g1.r0'."""
        return f"{self.replica_id}.g{self.generation}.r{rank}"

    def group(self, cluster: str) -> str:
        """The placement group; its name includes the cluster because groups have no namespace."""
        return f"{cluster}/{self.replica_id}.g{self.generation}"


def namespace(cluster: str) -> str:
    """The Ray namespace that holds a cluster's actors."""
    return f"headrace-{cluster}" if cluster != "headrace" else "headrace"


def replica_id(model: str, index: int) -> str:
    """'smollm2-0'; of a Hub id only the last part, cleaned: the id is used in names, logs and metric labels."""
    return f"{re.sub(r'[^A-Za-z0-9._-]+', '-', model.rsplit('/', 1)[-1])}-{index}"


def parse_rank(name: str) -> tuple[ReplicaName, int] | None:
    """The replica and rank behind an actor's name; None for other actors."""
    match = _RANK.fullmatch(name)
    return None if match is None else (ReplicaName(match["replica"], int(match["generation"])), int(match["rank"]))


def parse_group(name: str, cluster: str) -> ReplicaName | None:
    """The replica behind a placement group's name; None for groups of other clusters."""
    match = _GROUP.fullmatch(name)
    if match is None or match["cluster"] != cluster:
        return None
    return ReplicaName(match["replica"], int(match["generation"]))

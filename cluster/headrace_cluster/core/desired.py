"""The replicas that a spec describes. Pure."""

from headrace_cluster.core.naming import replica_id
from headrace_cluster.core.record import DesiredReplica
from headrace_cluster.spec.cluster_spec import ClusterSpec


def desired_replicas(spec: ClusterSpec) -> list[DesiredReplica]:
    """The replicas of the spec. Ids are unique even if two model names end alike; they name no role: roles change."""
    found: list[DesiredReplica] = []
    taken: dict[str, int] = {}
    for model in spec.models:
        prefix = replica_id(model.name, 0).removesuffix("-0")
        for pool in model.pools:
            first = taken.get(prefix, 0)
            ids = (replica_id(model.name, first + index) for index in range(pool.replicas))
            found += [DesiredReplica(found_id, model.shaped(pool), pool.role) for found_id in ids]
            taken[prefix] = first + pool.replicas
    return found

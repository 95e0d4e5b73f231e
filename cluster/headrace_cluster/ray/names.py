"""Finds and ends the actors and placement groups of a cluster in Ray, by name; nothing else in that Ray changes."""

import contextlib
from typing import Any

import ray
from ray.util import list_named_actors, placement_group_table, remove_placement_group
from ray.util.placement_group import get_placement_group

from headrace_cluster.core import naming
from headrace_cluster.core.naming import ReplicaName


def find_actor(name: str, cluster: str) -> Any | None:
    """A named actor of the cluster, or None if there is none. Raises an error of Ray when it does not answer."""
    try:
        return ray.get_actor(name, namespace=naming.namespace(cluster))
    except ValueError:
        return None


def kill_actor(name: str, cluster: str) -> None:
    """Ends a named actor's process, if it exists. Raises an error of Ray when it does not answer."""
    actor = find_actor(name, cluster)
    if actor is not None:
        with contextlib.suppress(ray.exceptions.RayActorError):  # it may end by itself meanwhile
            ray.kill(actor, no_restart=True)


def remove_group(name: str) -> None:
    """Removes a placement group, if it exists. Raises an error of Ray when it does not answer."""
    try:
        group = get_placement_group(name)
    except ValueError:
        return
    remove_placement_group(group)


def ranks(cluster: str) -> set[tuple[ReplicaName, int]]:
    """A cluster's live ranks, by build and rank."""
    space = naming.namespace(cluster)
    names = [entry["name"] for entry in list_named_actors(all_namespaces=True) if entry["namespace"] == space]
    return {rank for name in names if (rank := naming.parse_rank(name)) is not None}


def groups(cluster: str) -> dict[ReplicaName, bool]:
    """The builds that have a placement group, and whether it has a place."""
    found = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
    states = {naming.parse_group(group["name"], cluster): group["state"] == "CREATED" for group in found}
    return {name: placed for name, placed in states.items() if name is not None}


def nodes_of(cluster: str, model: str, without: str) -> set[str]:
    """Ids of the nodes on which builds of a model's replicas have a place, but for one replica."""
    prefix = naming.replica_id(model, 0).removesuffix("0")
    found: set[str] = set()
    for group in placement_group_table().values():
        name = naming.parse_group(group["name"], cluster)
        if name is None or name.replica_id == without or group["state"] == "REMOVED":
            continue
        if name.replica_id.removeprefix(prefix).isdigit():
            found |= set(group.get("bundles_to_node_id", {}).values())
    return found


def end_cluster(cluster: str) -> None:
    """Ends every rank and placement group of a cluster."""
    for name, rank in ranks(cluster):
        kill_actor(name.rank(rank), cluster)
    for name in groups(cluster):
        remove_group(name.group(cluster))

"""Ends what a cluster owns in Ray, found by name: nothing else in that Ray is touched."""

import contextlib
from typing import Any

import ray
from ray.util import list_named_actors, placement_group_table, remove_placement_group
from ray.util.placement_group import get_placement_group

from headrace_cluster import naming


def find_actor(name: str, cluster: str) -> Any | None:
    """A named actor of the cluster, or None."""
    try:
        return ray.get_actor(name, namespace=naming.namespace(cluster))
    except ValueError:
        return None


def kill_actor(name: str, cluster: str) -> None:
    """Ends a named actor's process, if it is there."""
    actor = find_actor(name, cluster)
    if actor is not None:
        with contextlib.suppress(Exception):  # it may end by itself in this very moment
            ray.kill(actor, no_restart=True)


def remove_group(name: str) -> None:
    """Removes a placement group, if it is there."""
    with contextlib.suppress(Exception):
        remove_placement_group(get_placement_group(name))


def end_ranks(cluster: str) -> None:
    """Ends every rank and placement group of a cluster."""
    space = naming.namespace(cluster)
    for entry in list_named_actors(all_namespaces=True):
        if entry["namespace"] == space and naming.parse_rank(entry["name"]) is not None:
            kill_actor(entry["name"], cluster)
    for group in placement_group_table().values():
        if group["state"] != "REMOVED" and naming.parse_group(group["name"], cluster) is not None:
            remove_group(group["name"])


def end_cluster(cluster: str) -> None:
    """Ends the controller, too."""
    kill_actor(naming.CONTROLLER, cluster)
    end_ranks(cluster)

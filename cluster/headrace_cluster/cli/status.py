"""`headrace status`."""

import json
from importlib.util import find_spec
from typing import Any

from headrace_cluster.cli.admin_client import AdminClient
from headrace_cluster.cli.servers import ServerChoice

_STYLES = {
    "ready": "green",
    "pending": "yellow",
    "starting": "yellow",
    "draining": "yellow",
    "unhealthy": "red",
    "dead": "red",
    "drained": "dim",
}


def print_json(choice: ServerChoice) -> None:
    """Prints the document; for a server of this user, with the sockets of its processes, Ray's included.

    Without psutil, which only the extra `cluster` installs, there are no sockets in it.
    """
    client = AdminClient(choice)
    document = client.call("GET", "/status")
    if client.state is not None and client.state.process.alive and find_spec("psutil") is not None:
        from headrace_cluster.local.sockets import listeners

        document["sockets"] = [listener.document() for listener in listeners(client.state.pid)]
    print(json.dumps(document, indent=2))


def print_table(choice: ServerChoice) -> None:
    """Prints the status as tables."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    client = AdminClient(choice)
    document = client.call("GET", "/status")
    console = Console(highlight=False)
    replicas = Table("replica", "model", "role", "tp×pp", "state", "running", "waiting", "KV used", box=None)
    for entry in document["replicas"]:
        load = entry["load"]
        state = Text(entry["state"], style=_STYLES.get(entry["state"], ""))
        counts = (str(load["running"]), str(load["waiting"]), f"{load['kv_usage']:.1%}")
        shape = f"{entry['tp']}×{entry['pp']}"
        replicas.add_row(entry["id"], entry["model"], entry["role"], shape, state, *counts)
    console.print(replicas)
    for entry in document["replicas"]:
        if entry["ranks"]:
            console.print(f"{entry['id']}: {_ranks(entry['ranks'])}", markup=False, soft_wrap=True)
        if entry.get("note"):
            console.print(f"{entry['id']}: {entry['note']}", markup=False)
        for other in entry.get("beside", ()):
            stage = f": {other['note']}" if other["note"] else ""
            line = f"{entry['id']}: beside it generation {other['generation']}, {other['state']}{stage}"
            console.print(line, markup=False)
        if entry.get("roll_failed"):
            console.print(f"{entry['id']} was not rolled: {entry['roll_failed']}", markup=False, soft_wrap=True)
    for problem in document.get("problems", ()):
        console.print(f"controller: {problem}", markup=False, soft_wrap=True)
    for entry in document["routers"]:
        grpc = f", gRPC {entry['grpc']}" if entry["grpc"] else ""
        metrics = f", metrics {entry['metrics']}" if entry["metrics"] != entry["http"] else ""
        line = f"router {entry['id']} (process {entry['pid']}): HTTP {entry['http']}{grpc}{metrics}"
        console.print(line, markup=False, soft_wrap=True)
        for placement in entry["placement"]:
            for line in placement_lines(placement):
                console.print(f"  {line}", markup=False, soft_wrap=True)
    if client.state is not None and client.state.ray_dashboard:
        token = f" (token: cat {client.state.ray_token_file})" if client.state.ray_token_file else ""
        console.print(f"Ray dashboard {client.state.ray_dashboard}{token}", markup=False, soft_wrap=True)


def placement_lines(placement: dict[str, Any]) -> list[str]:
    """How a router has placed the requests for a model."""
    model = placement["model"]
    lines = [f"{model}: placed by {placement['policy']}, no request yet"]
    if placement["placements"]:
        share = placement["cached_tokens"] / max(1, placement["prompt_tokens"])
        followed = f"{placement['cache_placements']} of {placement['placements']} placements followed a cache"
        lines = [f"{model}: placed by {placement['policy']}, {share:.0%} of prompt tokens cached, {followed}"]
    unknown = sorted(placement["unknown_caches"].items())
    return lines + [f"{model}: the KV blocks of {replica} are not known: {reason}" for replica, reason in unknown]


def _ranks(ranks: list[dict[str, Any]]) -> str:
    return ", ".join(
        f"rank {rank['rank']} {rank['device'] or '?'} on {rank['node']} (process {rank['pid']})" for rank in ranks
    )

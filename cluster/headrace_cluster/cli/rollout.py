"""`headrace rollout`: the server builds replicas again, one of a model at a time; this command shows how it goes."""

import time
from typing import Any

from headrace_cluster.cli.admin_client import AdminClient
from headrace_cluster.cli.drain import (
    POLL_SECONDS,
    START_SECONDS,
    STOP_SECONDS,
    Entry,
    in_flight,
    progress,
    warn_unrecorded,
)
from headrace_cluster.cli.servers import ServerChoice
from headrace_cluster.launch.display import show_message


def roll_out(choice: ServerChoice, replicas: list[str], seconds: float | None, *, allow_gap: bool = False) -> bool:
    """Rolls the given replicas, or all that are not drained. Returns whether all of them were rolled.

    If a new build of a model does not start, the rest of that model keeps its builds. Raises NotRunningError, and
    ServerError for a replica that does not exist.
    """
    client = AdminClient(choice)
    body: dict[str, Any] = {"replicas": replicas, "allow_gap": allow_gap}
    begun = client.call("POST", "/rollout", body | ({} if seconds is None else {"seconds": seconds}))
    warn_unrecorded(begun)
    for name in begun["drained"]:
        show_message(f"{name} is drained: it is not rolled")
    try:
        problems = _watch(client, begun["replicas"], START_SECONDS + begun["seconds"] + STOP_SECONDS)
    except KeyboardInterrupt:
        show_message("the rollout is completed by the server")
        raise
    show_message(f"{len(begun['replicas']) - len(problems)} of {len(begun['replicas'])} rolled")
    for name, problem in problems.items():
        show_message(f"  {name} was not rolled: {problem}")
    return not problems


def _watch(client: AdminClient, replicas: dict[str, int], patience: float) -> dict[str, str]:
    """Why replicas were not rolled, by id. replicas: with their generations before. patience: seconds for each."""
    left, shown, problems = dict(replicas), dict[str, str](), dict[str, str]()
    deadline = time.monotonic() + patience
    while left:
        entries = {entry["id"]: entry for entry in client.await_status()["replicas"]}
        failed = {entries[name]["model"] for name in problems if name in entries}
        for name, generation in list(left.items()):
            entry = entries.get(name)
            problem = _problem(entry, generation, failed, time.monotonic() > deadline)
            if problem:
                problems[name] = problem
            elif entry is not None and _is_rolled(entry, generation):
                show_message(f"{name} is rolled")
            else:
                if entry is not None and (text := _progress(entry)) != shown.get(name, "ready"):
                    show_message(f"{name}: {text}")
                    shown[name] = text
                continue
            del left[name]
            deadline = time.monotonic() + patience
        time.sleep(POLL_SECONDS)
    return problems


def _problem(entry: Entry | None, generation: int, failed: set[str], late: bool) -> str:
    """Why a replica will not be rolled; empty while it may be. failed: models with a replica that was not."""
    if entry is None:
        return "the spec does not name it any more"
    if entry["roll_failed"]:
        return str(entry["roll_failed"])
    if entry["state"] == "drained" or (entry["state"] == "dead" and entry["generation"] > generation):
        return f"it is {entry['state']}" + (f": {entry['note']}" if entry["note"] else "")
    if entry["model"] in failed and entry["generation"] == generation and not entry["beside"]:
        return "another one before it was not"
    return "it takes too long; see `headrace status`" if late else ""


def _is_rolled(entry: Entry, generation: int) -> bool:
    """The new build serves alone, and every router is connected to it."""
    serves = entry["state"] == "ready" and entry["connected"] and not entry["beside"]
    return bool(entry["generation"] > generation and serves)


def _progress(entry: Entry) -> str:
    """Without the seconds of a countdown, which would be a line each."""
    if entry["beside"]:
        other = entry["beside"][0]
        stage = f": {other['note']}" if other["note"] else ""
        builds = (f"generation {build['generation']} {build['state']}" for build in (entry, other))
        return ", ".join(builds) + stage
    if entry["state"] == "draining":
        return in_flight(entry)
    return progress(entry).partition("; next try in ")[0]

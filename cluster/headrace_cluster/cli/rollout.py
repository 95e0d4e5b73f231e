"""`headrace rollout`: the replicas of each model are built again, one after the other, while requests are answered."""

import time
from typing import Any

from headrace_cluster.cli.admin_client import AdminClient
from headrace_cluster.cli.drain import (
    CONNECT_SECONDS,
    POLL_SECONDS,
    START_SECONDS,
    STOP_SECONDS,
    Entry,
    in_flight,
    is_connecting,
    progress,
    watch_replica,
)
from headrace_cluster.cli.servers import ServerChoice
from headrace_cluster.errors import NotRunningError, ServerError
from headrace_cluster.launch.display import show_message
from headrace_cluster.program import program_name

REBUILT_STATES = ("dead", "pending", "starting", "unhealthy")  # such a replica becomes ready again by itself
NO_RECORD_SECONDS = 5.0  # without an effect on the replica, after which the request counts as lost


def roll_out(choice: ServerChoice, replicas: list[str], seconds: float | None, *, allow_gap: bool = False) -> bool:
    """Rolls the given replicas, or all that are not drained. Returns whether all of them were rolled.

    If a new build of a model does not start, the rest of that model keeps its builds; the other models continue, also
    after the controller was lost. Raises NotRunningError before the first request, and ServerError for a replica that
    does not exist.
    """
    client = AdminClient(choice)
    listed = {entry["id"]: entry for entry in client.call("GET", "/status")["replicas"]}
    unknown = [name for name in replicas if name not in listed]
    if unknown:
        raise ServerError(f"there is no replica {unknown[0]!r}; there are: {', '.join(listed)}")
    chosen = replicas or [name for name, entry in listed.items() if entry["state"] != "drained"]
    if not chosen:
        raise ServerError(f"every replica is drained: bring one back with {program_name()} undrain")
    models = dict.fromkeys(listed[name]["model"] for name in chosen)
    for name in sorted(listed.keys() - set(chosen)) if not replicas else ():
        show_message(f"{name} is drained: it is not rolled")
    options = {"seconds": seconds, "allow_gap": allow_gap}
    entries = {model: [listed[name] for name in chosen if listed[name]["model"] == model] for model in models}
    try:
        outcomes = {model: _roll_model(client, entries[model], options) for model in models}
    except KeyboardInterrupt:
        show_message("a build that was begun is completed by the server; what was not begun is not rolled")
        raise
    for model, problems in outcomes.items():
        count = len(entries[model])
        show_message(f"{model}: {count - len(problems)} of {count} rolled")
        for name, problem in problems.items():
            show_message(f"  {name} was not rolled: {problem}")
    return not any(outcomes.values())


def _roll_model(client: AdminClient, entries: list[Entry], options: dict[str, Any]) -> dict[str, str]:
    """Why replicas were not rolled, by id. After the first failure the model's other replicas are not rolled."""
    problems: dict[str, str] = {}
    # First those that are down, so that none ends while they are. Then prefill replicas: the model is served without
    # them, and they show whether a new build starts at all.
    for entry in sorted(entries, key=lambda entry: (entry["state"] not in REBUILT_STATES, entry["role"] != "prefill")):
        name = entry["id"]
        if problems:
            problems[name] = "another one before it was not"
            continue
        try:
            rolled = entry["state"] in REBUILT_STATES and _await_up(client, entry) > entry["generation"]
            if rolled or not _roll(client, entry, options):
                show_message(f"{name} is rolled: it was built again meanwhile")
        except (NotRunningError, ServerError) as error:
            problems[name] = str(error)
    return problems


def _roll(client: AdminClient, listed: Entry, options: dict[str, Any]) -> bool:
    """Returns false if another request has built it again meanwhile."""
    replica = listed["id"]
    body = {"replica": replica, **options}
    begun = _begin(client, listed, {name: value for name, value in body.items() if value is not None})
    if begun is None:
        return False
    show_message(f"{replica}: its next build starts {'beside it' if begun['beside'] else 'after it has ended'}")

    unchanged = 0  # consecutive polls that found no rollout of the replica

    def done(entry: Entry) -> bool:
        nonlocal unchanged
        if entry["roll_failed"]:
            raise ServerError(entry["roll_failed"])
        again = entry["generation"] > begun["generation"]
        plain = entry["state"] == "ready" and not again and not entry["beside"] and not entry["note"]
        unchanged = unchanged + 1 if plain else 0
        if unchanged * POLL_SECONDS >= NO_RECORD_SECONDS:  # lost with a controller, after its last View
            raise ServerError("the controller has no record of this rollout; roll it again")
        if entry["state"] == "drained" or (again and entry["state"] == "dead"):
            why = f": {entry['note']}" if entry["note"] else ""
            raise ServerError(f"it is {entry['state']}{why}")
        # The next replica must not end before every router is connected to this one.
        return bool(again and entry["state"] == "ready" and entry["connected"] and not entry["beside"])

    watch_replica(client, replica, done, _progress, START_SECONDS + begun["seconds"] + STOP_SECONDS)
    show_message(f"{replica} is rolled")
    return True


def _begin(client: AdminClient, entry: Entry, body: dict[str, Any]) -> dict[str, Any] | None:
    """Requests the rollout of a replica, when it and the others of its model are ready; those are waited for.

    None: another request has built it again meanwhile.
    """
    replica = entry["id"]
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return _post_rollout(client, body)
        except ServerError as error:
            entries = client.await_status()["replicas"]
            if is_connecting(entries) and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
                continue
            unsettled = [other for other in entries if not _is_settled(other) and other["model"] == entry["model"]]
            if not unsettled:
                raise
            refusal = str(error)
        itself = next((other for other in unsettled if other["id"] == replica), None)
        if itself is None:
            show_message(f"{replica} waits: {refusal}")
            watch_replica(client, unsettled[0]["id"], _is_settled, _stage, START_SECONDS)
        elif _await_up(client, itself) > entry["generation"] and itself["state"] not in REBUILT_STATES:
            return None
        deadline = time.monotonic() + CONNECT_SECONDS


def _await_up(client: AdminClient, entry: Entry) -> int:
    """Waits until a replica that is down or is rolled is ready. Returns its generation."""
    name = entry["id"]
    show_message(f"{name} is {'being rolled' if entry['beside'] else entry['state']}; waiting until it is ready")
    settled = watch_replica(client, name, _is_settled, _stage, START_SECONDS)
    if settled["state"] != "ready":
        raise ServerError(f"it is {settled['state']}")
    generation: int = settled["generation"]
    return generation


def _is_settled(entry: Entry) -> bool:
    """Whether it is ready, or stays drained; any other replica becomes so by itself."""
    return not entry["beside"] and entry["state"] not in (*REBUILT_STATES, "draining")


def _stage(entry: Entry) -> str:
    """Without the seconds of a countdown, which would be a line each."""
    return _progress(entry).partition("; next try in ")[0]


def _post_rollout(client: AdminClient, body: dict[str, Any]) -> dict[str, Any]:
    """POST /rollout; repeated once if the controller was lost. If the first one took effect, the second is rejected."""
    try:
        return client.call("POST", "/rollout", body)
    except NotRunningError:
        client.await_status()
        return client.call("POST", "/rollout", body)


def _progress(entry: Entry) -> str:
    if entry["beside"]:
        other = entry["beside"][0]
        stage = f": {other['note']}" if other["note"] else ""
        builds = (f"generation {build['generation']} {build['state']}" for build in (entry, other))
        return ", ".join(builds) + stage
    if entry["state"] == "draining" or (entry["state"] == "ready" and entry["connected"]):
        return in_flight(entry)
    return progress(entry)

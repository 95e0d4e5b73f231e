"""Commands that change replicas, and wait until it is done: apply, scale, rollout, drain, undrain, role."""

import json
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

from headrace_cluster.cli.admin_client import AdminClient
from headrace_cluster.cli.servers import ServerChoice
from headrace_cluster.errors import ServerError, SpecError
from headrace_cluster.launch.display import show_message
from headrace_cluster.program import program_name

POLL_SECONDS = 0.25
STOP_SECONDS = 60.0  # after the time for requests: to move the remaining ones and to end the processes
CONNECT_SECONDS = 45.0  # for routers to connect to replicas that are ready; a lost one counts for 40 s
START_SECONDS = 1800.0  # to load a model again

Entry = dict[str, Any]


def drain_replica(
    choice: ServerChoice, replica: str, seconds: float | None, *, force: bool = False, as_json: bool = False
) -> None:
    """Returns once the replica is drained. Raises NotRunningError; ServerError with the sentence of the server."""
    client = AdminClient(choice)
    entry = await_drained(client, replica, seconds, force=force)
    undrain = client.command(f"undrain {replica}")
    _print_result(entry, f"{replica} is drained; bring it back with: {undrain}", as_json=as_json)


def undrain_replica(choice: ServerChoice, replica: str, *, as_json: bool = False) -> None:
    """Returns once the replica is ready again and routers use it. Raises NotRunningError, ServerError."""
    _print_result(await_ready(AdminClient(choice), replica), f"{replica} is ready", as_json=as_json)


def await_drained(client: AdminClient, replica: str, seconds: float | None, *, force: bool = False) -> Entry:
    """Starts a drain; returns the replica's status entry when it is done. Raises ServerError."""
    body = {"replica": replica, "seconds": seconds, "force": force}
    begun = _begin_drain(client, {name: value for name, value in body.items() if value is not None})
    warn_unrecorded(begun)

    def done(entry: Entry) -> bool:
        if entry["state"] != "drained" and entry["generation"] != begun["generation"]:
            raise ServerError(f"{replica} was brought back while it was drained; see `{program_name()} status`")
        return bool(entry["state"] == "drained")

    return watch_replica(client, replica, done, in_flight, begun["seconds"] + STOP_SECONDS)


def await_ready(client: AdminClient, replica: str) -> Entry:
    """Has a drained replica built again; returns its status entry when it is ready. Raises ServerError."""
    begun = client.call("POST", "/undrain", {"replica": replica})
    warn_unrecorded(begun)

    def done(entry: Entry) -> bool:
        again = entry["generation"] > begun["generation"]
        if entry["state"] == "drained" or (again and entry["state"] == "dead"):
            why = f": {entry['note']}" if entry["note"] else ""
            raise ServerError(f"{replica} is {entry['state']}{why}")
        # Another one may be drained next: every router must be connected to this one then.
        return bool(again and entry["state"] == "ready" and entry["connected"])

    return watch_replica(client, replica, done, progress, START_SECONDS)


def is_connecting(entries: Sequence[Entry]) -> bool:
    """Whether routers still connect to ready replicas, as after the loss of a controller: it may refuse a call then."""
    return any(entry["state"] == "ready" and not entry["connected"] for entry in entries)


def _begin_drain(client: AdminClient, body: dict[str, Any]) -> dict[str, Any]:
    """POST /drain; repeated while routers connect."""
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            return client.call("POST", "/drain", body)
        except ServerError:
            if not is_connecting(client.await_status()["replicas"]) or time.monotonic() >= deadline:
                raise
        time.sleep(POLL_SECONDS)


def watch_replica(
    client: AdminClient, replica: str, done: Callable[[Entry], bool], shown: Callable[[Entry], str], seconds: float
) -> Entry:
    """The replica's status entry once `done`; shows its changes meanwhile.

    If the controller is lost, the next one is waited for. Raises NotRunningError, ServerError.
    """
    last = ""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        entries = client.await_status()["replicas"]
        entry: Entry | None = next((entry for entry in entries if entry["id"] == replica), None)
        if entry is None:
            raise ServerError(f"{replica} has ended: the server is stopping")
        if done(entry):
            return entry
        if (text := shown(entry)) != last:
            show_message(f"{replica}: {text}")
            last = text
        time.sleep(POLL_SECONDS)
    raise ServerError(f"{replica} is not done after {seconds:g} s; see `{program_name()} status`")


def warn_unrecorded(begun: dict[str, Any]) -> None:
    """The next controller may not know of it."""
    if not begun.get("recorded", True):
        show_message(
            "Ray's GCS does not answer: if the controller is lost before it does, this command has to be repeated",
            "warning",
        )


def in_flight(entry: Entry) -> str:
    """The state of a replica and its requests."""
    load = entry["load"]
    return f"{entry['state']}, {load['running']} running, {load['waiting']} waiting"


def progress(entry: Entry) -> str:
    """The state of a replica that starts, and its note if it has one."""
    if entry["state"] == "ready" and not entry["connected"]:
        return "ready; not every router is connected to it yet"
    return ": ".join(words for words in (entry["state"], entry["note"]) if words)


def _print_result(entry: Entry, sentence: str, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(entry, indent=2))
    else:
        show_message(sentence)


def roll_out(
    choice: ServerChoice,
    replicas: list[str],
    seconds: float | None,
    *,
    allow_gap: bool = False,
    model: str | None = None,
    settings: dict[str, Any] | None = None,
) -> bool:
    """Rolls the given replicas, or all that are not drained. Returns whether all of them were rolled.

    model: its replicas alone. settings: new values of its keys. If a new build of a model does not start, the rest of
    that model keeps its builds. Raises NotRunningError, ServerError.
    """
    client = AdminClient(choice)
    given = {"seconds": seconds, "model": model, "settings": settings or None}
    body = {"replicas": replicas, "allow_gap": allow_gap} | {
        k: value for k, value in given.items() if value is not None
    }
    begun = client.call("POST", "/rollout", body)
    warn_unrecorded(begun)
    for name in begun["drained"]:
        show_message(f"{name} is drained: it is not rolled")
    _show(begun.get("changes", []))
    chosen = begun["replicas"]
    return _watch(client, lambda entry: entry["id"] in chosen, "rolled", begun["seconds"])


def scale(choice: ServerChoice, pool: str, replicas: int) -> bool:
    """Another number of replicas of a model, or of a pool as MODEL.POOL. Returns whether all are ready."""
    client = AdminClient(choice)
    begun = client.call("POST", "/scale", {"pool": pool, "replicas": replicas})
    return _finish(client, begun)


def apply(choice: ServerChoice, models: list[dict[str, Any]], *, dry_run: bool) -> bool:
    """Other models. Returns whether all of their replicas are ready, and what they replace has ended."""
    client = AdminClient(choice)
    begun = client.call("POST", "/apply", {"models": models, "dry_run": dry_run}, APPLY_SECONDS)
    if dry_run:
        _show(begun["changes"] or ["nothing changes"])
        return True
    return _finish(client, begun)


def settings_of(given: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE, each value as in a spec file. Raises SpecError."""
    import yaml

    found: dict[str, Any] = {}
    for entry in given:
        key, equals, value = entry.partition("=")
        if not (key and equals):
            raise SpecError(f"--set is KEY=VALUE, such as max_num_seqs=16, not '{entry}'")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise SpecError(f"--set {entry}: the value is not YAML") from error
    return found


def _finish(client: AdminClient, begun: dict[str, Any]) -> bool:
    warn_unrecorded(begun)
    _show(begun["changes"] or ["nothing changes"])
    return _watch(client, lambda entry: entry["model"] in begun["models"], "ready", 0.0)


def _show(changes: Sequence[str]) -> None:
    for line in changes:
        show_message(line)


def _watch(client: AdminClient, chosen: Callable[[Entry], bool], done: str, seconds: float) -> bool:
    """Shows how the chosen replicas become what the server wants; returns whether all of them are.

    done: the word for one that is. seconds: for requests in flight.
    """
    patience = START_SECONDS + seconds + STOP_SECONDS  # for each
    deadline = time.monotonic() + patience
    shown, finished, problems = dict[str, str](), set[str](), dict[str, str]()
    try:
        while True:
            entries = [entry for entry in client.await_status()["replicas"] if chosen(entry)]
            failed = {entry["model"] for entry in entries if entry["id"] in problems}
            for entry in entries:
                name = entry["id"]
                if name in finished or name in problems:
                    continue
                if problem := _problem(entry, failed, late=time.monotonic() > deadline):
                    problems[name] = problem
                elif _is_settled(entry):
                    finished.add(name)
                    show_message(f"{name} is {done}")
                    deadline = time.monotonic() + patience
                elif (text := _progress(entry)) != shown.get(name, "ready"):
                    show_message(f"{name}: {text}")
                    shown[name] = text
            left = [entry for entry in entries if entry["id"] not in finished | problems.keys()]
            if not left:
                break
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        show_message("the server goes on with it")
        raise
    show_message(f"{len(finished)} of {len(finished) + len(problems)} {done}")
    for name, problem in problems.items():
        show_message(f"  {name} was not: {problem}")
    return not problems


def _problem(entry: Entry, failed: Collection[str], *, late: bool) -> str:
    """Why a replica will not become what is wanted; empty while it may. failed: models with a replica that did not."""
    if entry["roll_failed"] or entry["unable"]:
        return str(entry["roll_failed"] or entry["unable"])
    if entry["model"] in failed and entry["outdated"] and not entry["beside"]:
        return "another one before it was not"
    return "it takes too long; see `headrace status`" if late else ""


def _is_settled(entry: Entry) -> bool:
    """Its one build is as it is wanted, and every router is connected to it; or an operator drained it."""
    if entry["state"] == "drained":
        return True
    serves = entry["state"] == "ready" and entry["connected"] and not entry["beside"]
    return bool(serves and entry["wanted"] and not entry["outdated"])


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


ANSWER_SECONDS = 20.0
APPLY_SECONDS = 60.0  # for the check of the models, which may ask the Hub


def set_role(choice: ServerChoice, replica: str, role: str, *, as_json: bool) -> None:
    """Raises NotRunningError; ServerError with the sentence of the server."""
    document = AdminClient(choice).call("POST", "/role", {"replica": replica, "role": role}, ANSWER_SECONDS)
    if as_json:
        print(json.dumps(document, indent=2))
        return
    was = "as before" if document["before"] == document["role"] else f"it was {document['before']}"
    show_message(f"{replica}: {document['role']}, {was} ({document['seconds'] * 1e3:.0f} ms)")

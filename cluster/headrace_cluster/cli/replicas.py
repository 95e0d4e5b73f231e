"""Commands that change replicas, and wait until it is done: role, drain, undrain, rollout, scale, apply."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace_cluster.cli import options as o
from headrace_cluster.cli.admin_client import AdminClient
from headrace_cluster.cli.servers import ServerChoice
from headrace_cluster.errors import ServerError, SpecError
from headrace_cluster.launch.display import show_message
from headrace_cluster.program import program_name

POLL_SECONDS = 0.25
CALL_SECONDS = 60.0  # for the answer to a call; the check of other models may ask the Hub
STOP_SECONDS = 60.0  # after the time for requests: to move the remaining ones and to end the processes
CONNECT_SECONDS = 45.0  # for routers to connect to replicas that are ready; a lost one counts for 40 s
START_SECONDS = 1800.0  # to load a model again

Entry = dict[str, Any]  # entry of one replica in the answer of GET /status
Seconds = Annotated[
    float | None, typer.Option("--seconds", min=0, help="For requests in flight; what is left moves. [default: 5]")
]

app = typer.Typer(rich_markup_mode=None)


@app.command()
@o.takes_server()
def role(
    choice: ServerChoice,
    replica: o.Replica,
    role: Annotated[str, typer.Argument(metavar="prefill|decode|both", help="What routers are to use it for.")],
    json_: o.AsJson = False,
) -> None:
    """Give a running replica another role, in place: nothing is loaded again, its requests continue."""
    document = _begin(AdminClient(choice), "/role", replica=replica, role=role)
    if json_:
        print(json.dumps(document, indent=2))
    else:
        show_message(f"{replica}: {document['role']}, it was {document['before']}")


@app.command()
@o.takes_server()
def drain(
    choice: ServerChoice,
    replica: o.Replica,
    seconds: Seconds = None,
    force: Annotated[bool, typer.Option("--force", help="Even if no replica is left to answer.")] = False,
    json_: o.AsJson = False,
) -> None:
    """Drain a replica: its requests finish or move to others, then it ends and stays down."""
    client = AdminClient(choice)
    deadline = time.monotonic() + CONNECT_SECONDS
    while True:
        try:
            begun = _begin(client, "/drain", replica=replica, seconds=seconds, force=force)
            break
        except ServerError:  # as after the loss of a controller: routers still connect to ready replicas
            entries = client.await_status()["replicas"]
            connecting = any(entry["state"] == "ready" and not entry["connected"] for entry in entries)
            if not connecting or time.monotonic() > deadline:
                raise
        time.sleep(POLL_SECONDS)

    def is_drained(entry: Entry) -> bool:
        if entry["state"] != "drained" and entry["generation"] != begun["generation"]:
            raise ServerError("it was brought back meanwhile")
        return bool(entry["state"] == "drained")

    _await_one(client, replica, is_drained, "drained", begun["seconds"] + STOP_SECONDS, as_json=json_)
    if not json_:
        show_message(f"bring it back with: {program_name()} undrain {replica}")


@app.command()
@o.takes_server()
def undrain(choice: ServerChoice, replica: o.Replica, json_: o.AsJson = False) -> None:
    """Bring a drained replica back; returns when it is ready."""
    client = AdminClient(choice)
    begun = _begin(client, "/undrain", replica=replica)

    def is_back(entry: Entry) -> bool:
        again = entry["generation"] > begun["generation"]
        if entry["state"] == "drained" or (again and entry["state"] == "dead"):
            raise ServerError(_progress(entry))
        # Another one may be drained next: every router must be connected to this one then.
        return bool(again and entry["state"] == "ready" and entry["connected"])

    _await_one(client, replica, is_back, "ready", START_SECONDS, as_json=json_)


@app.command()
@o.takes_server()
def rollout(
    choice: ServerChoice,
    replicas: Annotated[
        list[str] | None, typer.Argument(metavar="[REPLICA]...", help="As `status` names them. [default: all]")
    ] = None,
    seconds: Seconds = None,
    allow_gap: Annotated[
        bool, typer.Option("--allow-gap", help="Even if another one is not ready, or two builds do not fit.")
    ] = False,
    model: Annotated[str | None, typer.Option("--model", help="Its replicas alone. [default: all models]")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Another value of a key of the model; several times."),
    ] = None,
) -> None:
    """Build replicas again, one after the other: requests finish or move, none fails.

    A replica ends when its next build, which starts beside it, is ready; without room for both, before. If a build of a
    model does not start, the rest of that model keeps its builds.
    """
    client = AdminClient(choice)
    body = {"replicas": replicas or [], "allow_gap": allow_gap, "seconds": seconds, "model": model}
    begun = _begin(client, "/rollout", **body, settings=_settings(set_ or []) or None)
    for name in begun["drained"]:
        show_message(f"{name} is drained: it is not rolled")
    back = [f"--set {key}={json.dumps(value)}" for key, value in begun.get("before", {}).items()]
    advice = " ".join([f"{program_name()} rollout", *([f"--model {model}"] if model else ()), *back]) if back else ""
    await_all(client, lambda entry: entry["id"] in begun["replicas"], "rolled", begun["seconds"], advice)


@app.command()
@o.takes_server()
def scale(
    choice: ServerChoice,
    pool: Annotated[str, typer.Argument(metavar="MODEL[.POOL]", help="A model, or its pool prefill or decode.")],
    replicas: Annotated[int, typer.Argument(metavar="N", min=1, help="How many replicas there are to be.")],
) -> None:
    """Give a model, or one of its pools, another number of replicas; returns when they are ready.

    It counts until the number in the spec changes.
    """
    client = AdminClient(choice)
    begun = _begin(client, "/scale", pool=pool, replicas=replicas)
    await_all(client, lambda entry: entry["model"] in begun["models"], "ready")


@app.command()
@o.takes_server()
def apply(
    choice: ServerChoice,
    config: Annotated[Path, typer.Option("--config", "-f", metavar="FILE", help="Spec, YAML or JSON: its models.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")] = False,
) -> None:
    """Roll out the models of a file: shows what changes, and returns when it is done.

    They count until the models in the spec of the cluster change.
    """
    from headrace_cluster.spec.settings import build_spec

    models = [model.model_dump(mode="json") for model in build_spec({}, config, {}).models]
    client = AdminClient(choice)
    begun = _begin(client, "/apply", models=models, dry_run=dry_run)
    if not begun["changes"]:
        show_message("nothing changes")
    if not dry_run:
        advice = f"{program_name()} apply -f, with the models that ran before"
        await_all(client, lambda entry: entry["model"] in begun["models"], "ready", back=advice)


def _settings(given: Sequence[str]) -> dict[str, Any]:
    """KEY=VALUE, each value as in a spec file. Raises SpecError."""
    import yaml

    found: dict[str, Any] = {}
    for entry in given:
        key, equals, value = entry.partition("=")
        try:
            found[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            equals = ""
        if not (key and equals):
            raise SpecError(f"--set is KEY=VALUE, such as max_num_seqs=16, not '{entry}'")
    return found


def _begin(client: AdminClient, path: str, **body: Any) -> dict[str, Any]:
    """The answer to a POST without the fields that are None; shows what changes."""
    fields = {name: value for name, value in body.items() if value is not None}
    begun = client.call("POST", path, fields, CALL_SECONDS)
    if not begun.get("recorded", True):
        show_message(
            "Ray's GCS does not answer: if the controller is lost before it does, this command has to be repeated",
            "warning",
        )
    for line in begun.get("changes", ()):
        show_message(line)
    return begun


def _await_one(
    client: AdminClient, replica: str, is_done: Callable[[Entry], bool], done: str, seconds: float, *, as_json: bool
) -> None:
    finished, problems = _wait(client, lambda entry: entry["id"] == replica, is_done, done, seconds)
    if replica not in finished:
        raise ServerError(f"{replica}: {problems.get(replica, 'the server is stopping')}")
    if as_json:
        print(json.dumps(finished[replica], indent=2))


def await_all(
    client: AdminClient, chosen: Callable[[Entry], bool], done: str, seconds: float = 0.0, back: str = ""
) -> None:
    """Shows the chosen replicas until each of them is as it is wanted; exits with 1 where one does not become so.

    done: the word for one that is. seconds: for its requests in flight. back: the command that takes the change back.
    """
    finished, problems = _wait(client, chosen, _is_settled, done, START_SECONDS + seconds + STOP_SECONDS)
    drained = [name for name, entry in finished.items() if entry["state"] == "drained"]
    ready = len(finished) - len(drained)
    also = f"; drained: {', '.join(drained)}" if drained else ""
    show_message(f"{ready} of {ready + len(problems)} {done}{also}")
    for name, problem in problems.items():
        show_message(f"  {name} was not: {problem}")
    if problems and back:
        show_message(f"the change stays wanted: a replica that ends is built with it; take it back with: {back}")
    if problems:
        raise typer.Exit(1)


def _wait(
    client: AdminClient, chosen: Callable[[Entry], bool], is_done: Callable[[Entry], bool], done: str, seconds: float
) -> tuple[dict[str, Entry], dict[str, str]]:
    """Shows the chosen replicas until each of them is done, has ended or fails; waits for the next controller, too.

    is_done: raises ServerError for one that will never be. done: the word for one that is. seconds: for each.
    Returns the entries of those that are done, and the reasons of the others.
    """
    shown, finished, problems = dict[str, str](), dict[str, Entry](), dict[str, str]()
    deadline = time.monotonic() + seconds
    while True:
        entries = [entry for entry in client.await_status()["replicas"] if chosen(entry)]
        failed = {entry["model"] for entry in entries if entry["id"] in problems}
        for entry in entries:
            name = entry["id"]
            if name in finished or name in problems:
                continue
            try:
                if is_done(entry):
                    finished[name] = entry
                    show_message(f"{name} is {'drained' if entry['state'] == 'drained' else done}")
                    deadline = time.monotonic() + seconds
                elif entry["model"] in failed and entry["outdated"] and not entry["beside"]:
                    problems[name] = "another one before it was not"
                elif time.monotonic() > deadline:
                    problems[name] = f"it takes too long; see `{program_name()} status`"
                elif (text := _progress(entry)) != shown.get(name, "ready"):
                    show_message(f"{name}: {text}")
                    shown[name] = text
            except ServerError as error:
                problems[name] = str(error)
        open_ = [entry for entry in entries if entry["id"] not in finished and entry["id"] not in problems]
        # Those that are not wanted any more stay while what is to replace them does not start.
        if not open_ or (problems and not any(entry["wanted"] for entry in open_)):
            return finished, problems
        time.sleep(POLL_SECONDS)


def _is_settled(entry: Entry) -> bool:
    """Its one build is as it is wanted, and every router is connected to it; or an operator drained it."""
    if problem := entry["roll_failed"] or entry["unable"]:
        raise ServerError(problem)
    serves = entry["state"] == "ready" and entry["connected"] and not entry["beside"]
    return bool(entry["state"] == "drained" or (serves and entry["wanted"] and not entry["outdated"]))


def _progress(entry: Entry) -> str:
    """Without the seconds of a countdown, which would be a line each."""
    if entry["beside"]:
        other = entry["beside"][0]
        stage = f": {other['note']}" if other["note"] else ""
        return ", ".join(f"generation {build['generation']} {build['state']}" for build in (entry, other)) + stage
    if entry["state"] == "draining":
        return f"draining, {entry['load']['running']} running, {entry['load']['waiting']} waiting"
    if entry["state"] == "ready" and not entry["connected"]:
        return "ready; not every router is connected to it yet"
    words = f"{entry['state']}: {entry['note']}" if entry["note"] else str(entry["state"])
    return words.partition("; next try in ")[0]

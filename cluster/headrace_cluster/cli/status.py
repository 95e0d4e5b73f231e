"""Commands that show: status, explain, profile."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace_base.errors import counted
from headrace_cluster.cli import options as o
from headrace_cluster.cli.admin_client import AdminClient
from headrace_cluster.cli.replicas import await_all
from headrace_cluster.cli.servers import ServerChoice

if TYPE_CHECKING:
    from rich.console import Console

SHOWN_SECONDS = 0.0005  # least duration of a cause that is shown
EXPLAIN_SECONDS = 10.0
PROFILE_SECONDS = 120.0  # a window is open for a minute at most; then the traces are written
_STYLES = {
    "ready": "green",
    "pending": "yellow",
    "starting": "yellow",
    "draining": "yellow",
    "unhealthy": "red",
    "dead": "red",
    "drained": "dim",
}

app = typer.Typer(rich_markup_mode=None)


@app.command()
@o.takes_server(named=True)
def status(
    choice: ServerChoice,
    json_: o.AsJson = False,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Until all are ready as wanted; 1 if one cannot be, or the spec file is refused.",
        ),
    ] = False,
) -> None:
    """Show replicas and routers of a running cluster."""
    client = AdminClient(choice)
    if wait:
        await_all(client, lambda entry: True, "ready")
    document = client.call("GET", "/status")
    if json_:
        print(json.dumps(document, indent=2))
    else:
        _show(document, client)
    if wait and document.get("spec_refused"):
        raise typer.Exit(1)


def _show(document: dict[str, Any], client: AdminClient) -> None:
    _show_replicas(document["replicas"])
    console = _console()
    for change in document.get("overrides", ()):
        console.print(f"operators changed the spec: {change}")
    for problem in document.get("problems", ()):
        console.print(f"controller: {problem}")
    for entry in document["routers"]:
        grpc = f", gRPC {entry['grpc']}" if entry["grpc"] else ""
        metrics = f", metrics {entry['metrics']}" if entry["metrics"] != entry["http"] else ""
        console.print(f"router {entry['id']} (process {entry['pid']}): HTTP {entry['http']}{grpc}{metrics}")
        for placement in entry["placement"]:
            for line in _placement_lines(placement):
                console.print(f"  {line}")
    if client.state is not None and client.state.ray_dashboard:
        token = f" (token: cat {client.state.ray_token_file})" if client.state.ray_token_file else ""
        console.print(f"Ray dashboard {client.state.ray_dashboard}{token}")


def _console() -> "Console":
    """For lines that are printed as they are."""
    from rich.console import Console

    return Console(highlight=False, markup=False, soft_wrap=True)


def _show_replicas(replicas: list[dict[str, Any]]) -> None:
    from rich.table import Table
    from rich.text import Text

    console = _console()
    table = Table("replica", "model", "role", "tp×pp", "state", "running", "waiting", "KV used", box=None)
    for entry in replicas:
        load = entry["load"]
        state = Text(entry["state"], style=_STYLES.get(entry["state"], ""))
        counts = (str(load["running"]), str(load["waiting"]), f"{load['kv_usage']:.1%}")
        table.add_row(entry["id"], entry["model"], entry["role"], f"{entry['tp']}×{entry['pp']}", state, *counts)
    console.print(table, soft_wrap=False)
    for entry in replicas:
        ranks = (
            f"rank {rank['rank']} {rank['device'] or '?'} on {rank['node']} (process {rank['pid']})"
            for rank in entry["ranks"]
        )
        notes = [", ".join(ranks), entry.get("note")]
        for other in entry.get("beside", ()):
            stage = f": {other['note']}" if other["note"] else ""
            notes.append(f"beside it generation {other['generation']}, {other['state']}{stage}")
        if entry.get("roll_failed"):
            notes.append(f"it was not rolled: {entry['roll_failed']}")
        notes += [
            f"reads KV blocks from {each['from']} by NIXL at {each['gb_per_second']:.2f} GB/s"
            for each in entry.get("transfers", ())
        ]
        for note in filter(None, notes):
            console.print(f"{entry['id']}: {note}")


def _placement_lines(placement: dict[str, Any]) -> list[str]:
    """How a router has placed the requests for a model."""
    model = placement["model"]
    lines = [f"{model}: placed by {placement['policy']}, no request yet"]
    if placement["placements"]:
        share = placement["cached_tokens"] / max(1, placement["prompt_tokens"])
        followed = f"{placement['cache_placements']} of {placement['placements']} placements followed a cache"
        lines = [f"{model}: placed by {placement['policy']}, {share:.0%} of prompt tokens cached, {followed}"]
    unknown = sorted(placement["unknown_caches"].items())
    return lines + [f"{model}: the KV blocks of {replica} are not known: {reason}" for replica, reason in unknown]


@app.command()
@o.takes_server()
def explain(
    choice: ServerChoice,
    request: Annotated[str, typer.Argument(metavar="REQUEST_ID", help="x-request-id of a response, or its id.")],
    json_: o.AsJson = False,
) -> None:
    """Show where the time of a request went, and why its replica was chosen."""
    document = AdminClient(choice).call("POST", "/explain", {"request": request}, EXPLAIN_SECONDS)
    if json_:
        print(json.dumps(document, indent=2))
        return
    for line in _account(document):
        print(line)


def _account(document: dict[str, Any]) -> Iterator[str]:
    state = "failed" if document["failed"] else "complete"
    if document["running"]:
        state = "so far"
    elif document["disconnected"]:
        state = "ended by its client"
    first = document["first_token"]
    yield (
        f"{document['request']}: {document['seconds']:.3f} s, {state}; first token "
        + (f"after {first:.3f} s" if first is not None else "not sent")
        + f"; {counted(document['prompt_tokens'], 'token')} of prompt, {document['cached_tokens']} of them cached; "
        + f"{counted(document['output_tokens'], 'token')} of answer"
    )
    if document["covered_tokens"]:
        start = f"from a snapshot of recurrent state after {document['snapshot_tokens']} tokens"
        if not document["snapshot_tokens"]:
            start = "without a snapshot of recurrent state"
        yield f"started {start}; keys and values of {document['covered_tokens']} were cached"
    if miss := document["cache_miss"]:
        yield f"not cached further: {miss['words']} ({counted(miss['tokens'], 'token')})"
    more = {"preempted": f" ({counted(document['preemptions'], 'time')})"}
    if document["ahead"]:
        ahead = counted(document["ahead"], "request")
        more["queue"] = f" (behind {ahead}, {document['ahead_tokens']} tokens of their prompts)"
    for entry in document["causes"]:
        seconds = entry["seconds"]
        if seconds >= SHOWN_SECONDS:
            share = seconds / document["seconds"]
            yield f"{seconds:9.3f} s {share:6.1%}  {entry['words']}{more.get(entry['cause'], '')}"
    for decision in document["decisions"]:
        yield from _decision(decision)


def _decision(decision: dict[str, Any]) -> Iterator[str]:
    line = f"placed on {decision['replica_id']}, of {counted(decision['candidates'], 'candidate')}"
    if prediction := decision["prediction"]:
        line += (
            f": predicted {prediction['first_token']:.3f} s until the first token, {prediction['answer']:.3f} s of "
            f"answer, others delayed by {prediction['delay']:.3f} s"
        )
    yield line
    if decision["source_id"]:
        how = "computes its prompt" if decision["source_computes"] else "sends cached blocks of its prompt"
        yield f"  {decision['source_id']} {how}"
    for each in decision["considered"]:
        cached = f"{each['cached_tokens']} of {decision['tokens']} tokens cached"
        yield f"  {each['replica_id']}: {each['cost']:.3f} s, {cached}"


@app.command()
@o.takes_server()
def profile(
    choice: ServerChoice,
    replica: Annotated[str | None, typer.Argument(metavar="[REPLICA]", help="As `status` names it.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="At most so many steps. [default: 20]")] = None,
    seconds: Annotated[float | None, typer.Option("--seconds", help="For at most so long. [default: 10]")] = None,
) -> None:
    """Record the next steps of a replica that runs with --profile DIR, every rank for itself."""
    fields = {"replica": replica, "steps": steps, "seconds": seconds}
    body = {name: value for name, value in fields.items() if value is not None}
    document = AdminClient(choice).call("POST", "/profile", body, PROFILE_SECONDS)
    console = _console()
    for trace in document["traces"]:
        where = f"rank {trace['rank']} on {trace['node']}"
        if "error" in trace:
            console.print(f"{where}: {trace['error']}")
            continue
        console.print(f"{where}: {counted(trace['steps'], 'step')} in {trace['seconds']:.3f} s  {trace['path']}")
        if trace["note"]:
            console.print(f"  {trace['note']}")
    _show_operators(document["operators"])
    console.print("Open them in https://ui.perfetto.dev or chrome://tracing.")


def _show_operators(operators: list[dict[str, Any]]) -> None:
    from rich.table import Table

    for on_device, title in ((True, "kernel of rank 0"), (False, "operator of rank 0, own time")):
        table = Table(box=None)
        table.add_column(title, max_width=80, overflow="ellipsis", no_wrap=True)
        for column in ("calls", "ms", "share"):
            table.add_column(column, justify="right")
        for entry in operators:
            if entry["on_device"] is on_device:
                milliseconds, share = f"{entry['milliseconds']:.2f}", f"{entry['share']:.1%}"
                table.add_row(entry["name"], str(entry["calls"]), milliseconds, share)
        if table.row_count:
            _console().print(table)

"""Commands that show: status, explain, profile."""

import json
from collections.abc import Iterator
from typing import Any

from headrace_cluster.cli.admin_client import AdminClient
from headrace_cluster.cli.servers import ServerChoice
from headrace_cluster.errors import ServerError
from headrace_proto.quantities import counted

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
    """Prints the document."""
    print(json.dumps(AdminClient(choice).call("GET", "/status"), indent=2))


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


SHOWN_SECONDS = 0.0005  # of a cause


def explain_request(choice: ServerChoice, request: str, *, as_json: bool) -> None:
    """Raises NotRunningError; ServerError with the sentence of the server."""
    document = AdminClient(choice).call("POST", "/explain", {"request": request}, timeout=10.0)
    if as_json:
        print(json.dumps(document, indent=2))
        return
    try:
        lines = list(_lines(document))
    except (ArithmeticError, AttributeError, KeyError, TypeError, ValueError):
        raise ServerError(
            "The account is not as this release of headrace has it; print it with --json, or use the router's release."
        ) from None
    for line in lines:  # a router may send anything, the terminal's control characters included
        print("".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line))


def _lines(document: dict[str, Any]) -> Iterator[str]:
    yield _summary(document)
    for entry in document["causes"]:
        seconds = entry["seconds"]
        if seconds >= SHOWN_SECONDS:
            share = seconds / document["seconds"]
            yield f"{seconds:9.3f} s {share:6.1%}  {entry['words']}{_more(entry['cause'], document)}"
    for decision in document["decisions"]:
        yield from _decision(decision)


def _summary(document: dict[str, Any]) -> str:
    state = "failed" if document["failed"] else "complete"
    if document["running"]:
        state = "so far"
    elif document["disconnected"]:
        state = "ended by its client"
    first = document["first_token"]
    return (
        f"{document['request']}: {document['seconds']:.3f} s, {state}; first token "
        + (f"after {first:.3f} s" if first is not None else "not sent")
        + f"; {counted(document['prompt_tokens'], 'token')} of prompt, {document['cached_tokens']} of them cached; "
        + f"{counted(document['output_tokens'], 'token')} of answer"
    )


def _more(cause: str, document: dict[str, Any]) -> str:
    """What is known besides its time."""
    if cause == "queue" and document["ahead"]:
        return f" (behind {counted(document['ahead'], 'request')}, {document['ahead_tokens']} tokens of their prompts)"
    if cause == "preempted":
        return f" ({counted(document['preemptions'], 'time')})"
    return ""


def _decision(decision: dict[str, Any]) -> list[str]:
    lines = [f"placed on {decision['replica_id']}, of {counted(decision['candidates'], 'candidate')}"]
    prediction = decision["prediction"]
    if prediction is not None:
        lines[0] += (
            f": predicted {prediction['first_token']:.3f} s until the first token, {prediction['answer']:.3f} s of "
            f"answer, others delayed by {prediction['delay']:.3f} s"
        )
    if decision["source_id"]:
        how = "computes its prompt" if decision["source_computes"] else "sends cached blocks of its prompt"
        lines.append(f"  {decision['source_id']} {how}")
    return lines + [
        f"  {each['replica_id']}: {each['cost']:.3f} s, {each['cached_tokens']} of {decision['tokens']} tokens cached"
        for each in decision["considered"]
    ]


ANSWER_SECONDS = 120.0  # a window is open for a minute at most; then the traces are written


def profile_replica(choice: ServerChoice, replica: str | None, steps: int | None, seconds: float | None) -> None:
    """Raises NotRunningError; ServerError with the sentence of the server."""
    from rich.console import Console

    fields = {"replica": replica, "steps": steps, "seconds": seconds}
    body = {name: value for name, value in fields.items() if value is not None}
    document = AdminClient(choice).call("POST", "/profile", body, ANSWER_SECONDS)
    console = Console(highlight=False, markup=False, soft_wrap=True)
    for trace in document["traces"]:
        where = f"rank {trace['rank']} on {trace['node']}"
        if "error" in trace:
            console.print(f"{where}: {trace['error']}")
            continue
        console.print(f"{where}: {counted(trace['steps'], 'step')} in {trace['seconds']:.3f} s  {trace['path']}")
        if trace["note"]:
            console.print(f"  {trace['note']}")
    _print_operators(console, document["operators"])
    console.print("Open them in https://ui.perfetto.dev or chrome://tracing.")


def _print_operators(console: Any, operators: list[dict[str, Any]]) -> None:
    from rich.table import Table

    for on_device, title in ((True, "kernel of rank 0"), (False, "operator of rank 0, own time")):
        rows = [entry for entry in operators if entry["on_device"] is on_device]
        if not rows:
            continue
        table = Table(box=None)
        table.add_column(title, max_width=80, overflow="ellipsis", no_wrap=True)
        for column in ("calls", "ms", "share"):
            table.add_column(column, justify="right")
        for entry in rows:
            share = f"{entry['share']:.1%}"
            table.add_row(entry["name"], str(entry["calls"]), f"{entry['milliseconds']:.2f}", share)
        console.print(table)

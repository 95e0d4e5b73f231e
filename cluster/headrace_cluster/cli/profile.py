"""`headrace profile`: traces of the next steps of one replica, and their operators by time."""

from typing import Any

from headrace_cluster.cli.admin_client import AdminClient
from headrace_cluster.cli.servers import ServerChoice
from headrace_proto.quantities import counted

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

"""`headrace rollout`: replicas are built again one after the other, while the others answer."""

from headrace_cluster.cli.client import AdminClient, ServerError
from headrace_cluster.cli.drain import await_drained, await_ready
from headrace_cluster.display import say


def roll_out(admin_port: int, replicas: list[str], seconds: float | None, *, force: bool = False) -> None:
    """Returns once all are ready again: those named, or all that are not drained.

    Raises NotRunningError; ServerError with the sentence of whatever stopped it, and the rest is left as it was.
    """
    client = AdminClient(admin_port)
    listed = {entry["id"]: entry for entry in client.call("GET", "/status")["replicas"]}
    unknown = [name for name in replicas if name not in listed]
    if unknown:
        raise ServerError(f"there is no replica {unknown[0]!r}; there are: {', '.join(listed)}")
    chosen = replicas or [name for name, entry in listed.items() if entry["state"] != "drained"]
    if not chosen:
        raise ServerError("every replica is drained: bring one back with headrace undrain")
    # Those that compute prompts first: they are only helpers, and show whether a new build comes up at all.
    chosen = sorted(chosen, key=lambda name: listed[name].get("role") != "prefill")
    for number, name in enumerate(chosen, 1):
        say(f"{number} of {len(chosen)}: {name}")
        await_drained(client, name, seconds, force=force)
        await_ready(client, name)
    say(f"{len(chosen)} replicas were built again" if len(chosen) > 1 else f"{chosen[0]} was built again")

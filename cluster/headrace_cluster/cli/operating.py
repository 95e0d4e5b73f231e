"""The commands for a running server: to talk to it, to look at it, to change it."""

from typing import Annotated

import typer

from headrace_cluster.cli import options as o

app = typer.Typer(rich_markup_mode=None)


@app.command()
def chat(
    once: Annotated[str | None, typer.Option("--once", metavar="TEXT", help="Print one answer and exit.")] = None,
    model: Annotated[str | None, typer.Option("--model", help="[default: the server's first]")] = None,
    system: Annotated[str | None, typer.Option("--system", help="The system message.")] = None,
    max_tokens: Annotated[int | None, typer.Option("--max-tokens", min=1)] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", min=0.0)] = None,
    host: o.Host = None,
    port: o.Port = None,
    admin_port: o.AdminPort = None,
    api_key: o.ApiKey = None,
) -> None:
    """Talk to a running server."""
    from headrace_cluster.cli.chat import Chat
    from headrace_cluster.cli.client import ApiClient

    client = ApiClient(o.client_setting("host", host, "127.0.0.1"), o.client_setting("port", port, 8000), api_key)
    session = Chat(client, model=model, system=system, max_tokens=max_tokens, temperature=temperature)
    if once is not None:
        session.once(once)
    else:
        session.talk()


@app.command()
def status(
    json_: Annotated[bool, typer.Option("--json", help="Print the document for programs.")] = False,
    host: o.Host = None,
    port: o.Port = None,
    admin_port: o.AdminPort = None,
) -> None:
    """Show replicas and routers of a running cluster."""
    from headrace_cluster.cli.status import print_json, print_table

    admin = o.client_setting("admin_port", admin_port, 8002)
    print_json(admin) if json_ else print_table(admin)


@app.command()
def role(
    replica: o.Replica,
    role: Annotated[str, typer.Argument(metavar="prefill|decode|both", help="What routers are to use it for.")],
    json_: o.AsJson = False,
    admin_port: o.AdminPort = None,
) -> None:
    """Give a running replica another role, in place: nothing is loaded again, what runs there goes on."""
    from headrace_cluster.cli.role import set_role

    set_role(o.client_setting("admin_port", admin_port, 8002), replica, role, as_json=json_)


@app.command()
def drain(
    replica: o.Replica,
    seconds: Annotated[
        float | None, typer.Option("--seconds", min=0, help="For requests in flight; what is left moves. [default: 5]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Even if nobody is left to answer.")] = False,
    json_: o.AsJson = False,
    admin_port: o.AdminPort = None,
) -> None:
    """Take a replica out: its requests finish or move to others, then it ends and stays down."""
    from headrace_cluster.cli.drain import drain_replica

    drain_replica(o.client_setting("admin_port", admin_port, 8002), replica, seconds, force=force, as_json=json_)


@app.command()
def undrain(replica: o.Replica, json_: o.AsJson = False, admin_port: o.AdminPort = None) -> None:
    """Bring a drained replica back; returns when it is ready."""
    from headrace_cluster.cli.drain import undrain_replica

    undrain_replica(o.client_setting("admin_port", admin_port, 8002), replica, as_json=json_)


@app.command()
def rollout(
    replicas: Annotated[
        list[str] | None, typer.Argument(metavar="[REPLICA]...", help="As `status` names them. [default: all]")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", min=0, help="For requests in flight; what is left moves. [default: 5]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Even if nobody is left to answer meanwhile.")] = False,
    admin_port: o.AdminPort = None,
) -> None:
    """Build replicas again, one after the other: their requests finish or move, and nobody's fails."""
    from headrace_cluster.cli.rollout import roll_out

    roll_out(o.client_setting("admin_port", admin_port, 8002), replicas or [], seconds, force=force)


@app.command()
def profile(
    replica: Annotated[str | None, typer.Argument(metavar="[REPLICA]", help="As `status` names it.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="At most so many steps. [default: 20]")] = None,
    seconds: Annotated[float | None, typer.Option("--seconds", help="For at most so long. [default: 10]")] = None,
    host: o.Host = None,
    port: o.Port = None,
    admin_port: o.AdminPort = None,
) -> None:
    """Record the next steps of a replica that runs with --profile DIR, every rank for itself."""
    from headrace_cluster.cli.profile import profile_replica

    profile_replica(o.client_setting("admin_port", admin_port, 8002), replica, steps, seconds)


@app.command()
def stop(
    host: o.Host = None,
    port: o.Port = None,
    admin_port: o.AdminPort = None,
    wait: Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for the end.")] = 40,
) -> None:
    """Stop a running server, in order."""
    from headrace_cluster.cli.stop import stop_server

    stop_server(o.client_setting("admin_port", admin_port, 8002), wait)

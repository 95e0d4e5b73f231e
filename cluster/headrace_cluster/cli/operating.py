"""The commands for a running server: chat, status, logs, changes."""

from pathlib import Path
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
    temperature: Annotated[float | None, typer.Option("--temperature", min=0.0, max=2.0)] = None,
    tools: Annotated[
        Path | None, typer.Option("--tools", metavar="FILE", help="Tools that the model may call, as JSON.")
    ] = None,
    stats: Annotated[bool, typer.Option("--stats", help="Show speed and tokens of each answer, on stderr.")] = False,
    host: Annotated[
        str | None, typer.Option("--host", help="Of a server elsewhere, with --port; https://HOST with TLS.")
    ] = None,
    port: o.ServerPort = None,
    admin_port: o.ServerAdminPort = None,
    cluster: o.ServerName = None,
    api_key: o.ApiKey = None,
    ca: o.Ca = None,
    client_cert: o.ClientCert = None,
) -> None:
    """Talk to a running server. A standard input that is not a terminal is one message: headrace chat < FILE."""
    from headrace_cluster.cli.api_client import api_client
    from headrace_cluster.cli.chat_session import start_chat

    chosen = o.choice(port, admin_port, cluster)
    client = api_client(chosen, o.client_host(host), api_key, ca=ca, client_cert=client_cert)
    settings = {"max_tokens": max_tokens, "temperature": temperature}
    start_chat(client, once=once, model=model, system=system, settings=settings, stats=stats, tools=tools)


@app.command()
def status(
    server: o.Server = None,
    json_: Annotated[bool, typer.Option("--json", help="Print the document for programs.")] = False,
    port: o.ServerPort = None,
    admin_port: o.ServerAdminPort = None,
    cluster: o.ServerName = None,
) -> None:
    """Show replicas and routers of a running cluster."""
    from headrace_cluster.cli.status import print_json, print_table

    choice = o.choice(port, admin_port, cluster, server)
    print_json(choice) if json_ else print_table(choice)


@app.command()
def explain(
    request: Annotated[str, typer.Argument(metavar="REQUEST_ID", help="x-request-id of a response, or its id.")],
    json_: Annotated[bool, typer.Option("--json", help="Print the document for programs.")] = False,
    port: o.ServerPort = None,
    admin_port: o.ServerAdminPort = None,
    cluster: o.ServerName = None,
) -> None:
    """Show where the time of a request went, and why its replica was chosen."""
    from headrace_cluster.cli.status import explain_request

    explain_request(o.choice(port, admin_port, cluster), request, as_json=json_)


@app.command()
def logs(
    part: Annotated[
        str | None,
        typer.Argument(metavar="[REPLICA]", help="Or router, controller, serve. [default: all, merged by time]"),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Records to begin with.")] = 100,
    path: Annotated[bool, typer.Option("--path", help="Print the folder of the files, and exit.")] = False,
    port: o.ServerPort = None,
    admin_port: o.ServerAdminPort = None,
    cluster: o.ServerName = None,
) -> None:
    """Show what the processes of a server log, or logged in its last run."""
    from headrace_cluster.cli.logs import find_run, print_logs

    run = find_run(o.choice(port, admin_port, cluster), part)
    if path:
        print(run)
    else:
        print_logs(run, part, lines, follow=follow)


@app.command()
def role(
    replica: o.Replica,
    role: Annotated[str, typer.Argument(metavar="prefill|decode|both", help="What routers are to use it for.")],
    json_: o.AsJson = False,
    port: o.ServerPort = None,
    admin_port: o.ServerAdminPort = None,
    cluster: o.ServerName = None,
) -> None:
    """Give a running replica another role, in place: nothing is loaded again, its requests continue."""
    from headrace_cluster.cli.replicas import set_role

    set_role(o.choice(port, admin_port, cluster), replica, role, as_json=json_)


@app.command()
def drain(
    replica: o.Replica,
    seconds: Annotated[
        float | None, typer.Option("--seconds", min=0, help="For requests in flight; what is left moves. [default: 5]")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Even if no replica is left to answer.")] = False,
    json_: o.AsJson = False,
    port: o.ServerPort = None,
    admin_port: o.ServerAdminPort = None,
    cluster: o.ServerName = None,
) -> None:
    """Drain a replica: its requests finish or move to others, then it ends and stays down."""
    from headrace_cluster.cli.replicas import drain_replica

    drain_replica(o.choice(port, admin_port, cluster), replica, seconds, force=force, as_json=json_)


@app.command()
def undrain(
    replica: o.Replica,
    json_: o.AsJson = False,
    port: o.ServerPort = None,
    admin_port: o.ServerAdminPort = None,
    cluster: o.ServerName = None,
) -> None:
    """Bring a drained replica back; returns when it is ready."""
    from headrace_cluster.cli.replicas import undrain_replica

    undrain_replica(o.choice(port, admin_port, cluster), replica, as_json=json_)


@app.command()
def rollout(
    replicas: Annotated[
        list[str] | None, typer.Argument(metavar="[REPLICA]...", help="As `status` names them. [default: all]")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", min=0, help="For requests in flight; what is left moves. [default: 5]")
    ] = None,
    allow_gap: Annotated[
        bool, typer.Option("--allow-gap", help="Even if another one is not ready, or two builds do not fit.")
    ] = False,
    model: Annotated[str | None, typer.Option("--model", help="Its replicas alone. [default: all models]")] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Another value of a key of the model; several times."),
    ] = None,
    port: o.ServerPort = None,
    admin_port: o.ServerAdminPort = None,
    cluster: o.ServerName = None,
) -> None:
    """Build replicas again, one after the other: requests finish or move, none fails.

    A replica ends when its next build, which starts beside it, is ready; without room for both, before.
    """
    from headrace_cluster.cli.replicas import roll_out, settings_of

    chosen = o.choice(port, admin_port, cluster)
    settings = settings_of(set_ or [])
    if not roll_out(chosen, replicas or [], seconds, allow_gap=allow_gap, model=model, settings=settings):
        raise typer.Exit(1)


@app.command()
def scale(
    pool: Annotated[str, typer.Argument(metavar="MODEL[.POOL]", help="A model, or its pool prefill or decode.")],
    replicas: Annotated[int, typer.Argument(metavar="N", min=1, help="How many replicas there are to be.")],
    port: o.ServerPort = None,
    admin_port: o.ServerAdminPort = None,
    cluster: o.ServerName = None,
) -> None:
    """Give a model, or one of its pools, another number of replicas; returns when they are ready.

    It counts until the number in the spec changes.
    """
    from headrace_cluster.cli.replicas import scale

    if not scale(o.choice(port, admin_port, cluster), pool, replicas):
        raise typer.Exit(1)


@app.command()
def apply(
    config: Annotated[Path, typer.Option("--config", "-f", metavar="FILE", help="Spec, YAML or JSON: its models.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")] = False,
    port: o.ServerPort = None,
    admin_port: o.ServerAdminPort = None,
    cluster: o.ServerName = None,
) -> None:
    """Roll out the models of a file: shows what changes, and returns when it is done.

    They count until the models in the spec of the cluster change.
    """
    from headrace_cluster.cli.replicas import apply
    from headrace_cluster.spec.settings import build_spec

    models = [model.model_dump(mode="json") for model in build_spec({}, config, {}).models]
    if not apply(o.choice(port, admin_port, cluster), models, dry_run=dry_run):
        raise typer.Exit(1)


@app.command()
def profile(
    replica: Annotated[str | None, typer.Argument(metavar="[REPLICA]", help="As `status` names it.")] = None,
    steps: Annotated[int | None, typer.Option("--steps", help="At most so many steps. [default: 20]")] = None,
    seconds: Annotated[float | None, typer.Option("--seconds", help="For at most so long. [default: 10]")] = None,
    port: o.ServerPort = None,
    admin_port: o.ServerAdminPort = None,
    cluster: o.ServerName = None,
) -> None:
    """Record the next steps of a replica that runs with --profile DIR, every rank for itself."""
    from headrace_cluster.cli.status import profile_replica

    profile_replica(o.choice(port, admin_port, cluster), replica, steps, seconds)


@app.command()
def stop(
    server: o.Server = None,
    port: o.ServerPort = None,
    admin_port: o.ServerAdminPort = None,
    cluster: o.ServerName = None,
    wait: Annotated[
        float | None, typer.Option("--wait", min=0, help="Seconds to wait for the end. [default: as the server needs]")
    ] = None,
    now: Annotated[bool, typer.Option("--now", help="End requests in flight with an error, at once.")] = False,
) -> None:
    """Stop a running server, in order: requests in flight finish first."""
    from headrace_cluster.cli.stop import stop_server

    stop_server(o.choice(port, admin_port, cluster, server), wait, now=now)

"""Every command, one function each; what a command does lives in a module of its own."""

import sys
from typing import Annotated, Any

import typer

from headrace_cluster.cli import options as o

app = typer.Typer(
    name="headrace",
    help="Serve large language models on many GPUs, or on none.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
config_app = typer.Typer(help="The cluster spec.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")


def _given(arguments: dict[str, Any]) -> dict[str, Any]:
    """A command's flags by option name, without those that were not given."""
    return {name: value for name, value in arguments.items() if value is not None and name != "config"}


def _spec(arguments: dict[str, Any]) -> Any:
    import os

    from headrace_cluster.display import say
    from headrace_cluster.settings import build_spec, unknown_variables

    for sentence in unknown_variables(os.environ):
        say(f"warning: {sentence}")
    return build_spec(_given(arguments), arguments.get("config"))


@app.command()
def serve(
    model: o.Model = None,
    config: o.Config = None,
    host: o.Host = None,
    port: o.Port = None,
    grpc_port: o.GrpcPort = None,
    admin_port: o.AdminPort = None,
    replicas: o.Replicas = None,
    prefill: o.Prefill = None,
    decode: o.Decode = None,
    prefill_tp: o.PrefillTp = None,
    prefill_pp: o.PrefillPp = None,
    decode_tp: o.DecodeTp = None,
    decode_pp: o.DecodePp = None,
    tp: o.Tp = None,
    pp: o.Pp = None,
    ep: o.Ep = None,
    device: o.Device = None,
    dtype: o.Dtype = None,
    load_format: o.LoadFormat = None,
    max_model_len: o.MaxModelLen = None,
    kv_cache_memory: o.KvMemory = None,
    block_size: o.BlockSize = None,
    max_num_seqs: o.MaxSeqs = None,
    max_num_batched_tokens: o.MaxBatched = None,
    cpu_threads: o.CpuThreads = None,
    cpu_share: o.CpuShare = None,
    async_scheduling: o.AsyncScheduling = None,
    cuda_graphs: o.CudaGraphs = None,
    deterministic: o.Deterministic = None,
    profile: o.Profile = None,
    served_model_name: o.ServedName = None,
    revision: o.Revision = None,
    trust_remote_code: o.TrustCode = None,
    ray_address: o.RayAddress = None,
    cluster: o.Cluster = None,
    control_host: o.ControlHost = None,
    control_port: o.ControlPort = None,
    secret_file: o.SecretFile = None,
    api_keys_file: o.ApiKeysFile = None,
    allow_no_auth: o.NoAuth = None,
    routers: o.Routers = None,
    migration_limit: o.MigrationLimit = None,
    disaggregation: o.Disaggregation = None,
    rebalancing: o.Rebalancing = None,
) -> None:
    """Start everything for one model: Ray, controller, replicas, router."""
    arguments = locals().copy()
    from headrace_cluster.serve import Serve

    raise typer.Exit(Serve(_spec(arguments)).run())


@app.command()
def controller(
    model: o.Model = None,
    config: o.Config = None,
    admin_port: o.AdminPort = None,
    replicas: o.Replicas = None,
    ray_address: o.RayAddress = None,
    cluster: o.Cluster = None,
    control_host: o.ControlHost = None,
    control_port: o.ControlPort = None,
    secret_file: o.SecretFile = None,
) -> None:
    """Start controller and replicas without a router, on the Ray that runs on this node."""
    arguments = locals().copy()
    from headrace_cluster.serve import Serve

    spec = _spec(arguments)
    if spec.ray.address is None:
        spec = spec.model_copy(update={"ray": spec.ray.model_copy(update={"address": "auto"})})
    raise typer.Exit(Serve(spec, with_router=False).run())


@app.command()
def router(
    controller: Annotated[str | None, typer.Option("--controller", help="HOST:PORT of the controller.")] = None,
    config: o.Config = None,
    host: o.Host = None,
    port: o.Port = None,
    grpc_port: o.GrpcPort = None,
    secret_file: o.SecretFile = None,
    api_keys_file: o.ApiKeysFile = None,
    allow_no_auth: o.NoAuth = None,
    migration_limit: o.MigrationLimit = None,
    disaggregation: o.Disaggregation = None,
    rebalancing: o.Rebalancing = None,
    config_stdin: Annotated[bool, typer.Option("--config-stdin", hidden=True)] = False,
    parent: Annotated[int, typer.Option("--parent", hidden=True)] = 0,
) -> None:
    """Start a router alone; it learns from a controller who serves."""
    arguments = {
        name: value for name, value in locals().items() if name not in ("controller", "config_stdin", "parent")
    }
    from headrace_cluster.cli.router import run_from_stdin, run_router

    if config_stdin:
        raise typer.Exit(run_from_stdin(parent))
    if controller is None:
        raise typer.BadParameter("name the controller: --controller HOST:PORT")
    raise typer.Exit(run_router(_spec(arguments), controller))


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


@config_app.command("show")
def config_show(
    model: o.Model = None,
    config: o.Config = None,
    host: o.Host = None,
    port: o.Port = None,
    grpc_port: o.GrpcPort = None,
    admin_port: o.AdminPort = None,
    routers: o.Routers = None,
    replicas: o.Replicas = None,
    prefill: o.Prefill = None,
    decode: o.Decode = None,
    prefill_tp: o.PrefillTp = None,
    prefill_pp: o.PrefillPp = None,
    decode_tp: o.DecodeTp = None,
    decode_pp: o.DecodePp = None,
    tp: o.Tp = None,
    pp: o.Pp = None,
    ep: o.Ep = None,
    device: o.Device = None,
    dtype: o.Dtype = None,
    ray_address: o.RayAddress = None,
) -> None:
    """Print the spec that flags, environment and file make together, as YAML."""
    arguments = locals().copy()
    import yaml

    document = _spec(arguments).model_dump(mode="json")
    sys.stdout.write(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of the spec."""
    import json

    from headrace_cluster.spec import ClusterSpec

    print(json.dumps(ClusterSpec.model_json_schema(), indent=2))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def test(context: typer.Context) -> None:
    """Check style, types and behaviour of this checkout; --slow for the long tests; more goes to pytest."""
    from headrace_cluster.cli.test import run_tests

    raise typer.Exit(run_tests(list(context.args)))


@app.command()
def version() -> None:
    """Print the version."""
    from importlib.metadata import version as installed

    print(installed("headrace"))

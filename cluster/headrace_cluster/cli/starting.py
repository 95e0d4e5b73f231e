"""The commands that start something, and those that show what would be started."""

import sys
from typing import Annotated, Any

import typer

from headrace_cluster.cli import options as o

app = typer.Typer(rich_markup_mode=None)
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

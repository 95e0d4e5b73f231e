"""The commands that start a server, a controller or a router, and those that show the spec."""

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace_cluster.cli import options as o
from headrace_cluster.launch.display import show_message, use_log_format
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_cluster.spec.settings import build_spec, config_file, misspelt

CONTROL_PORT = 8004

app = typer.Typer(rich_markup_mode=None)
config_app = typer.Typer(help="The cluster spec.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(config_app, name="config")


def _spec(given: dict[str, Any], config: Path | None) -> ClusterSpec:
    if given.get("log_format") == "json" or os.environ.get("HEADRACE_LOG_FORMAT", "").strip() == "json":
        use_log_format("json")  # errors in the spec are then JSON lines on stderr, too
    spec = build_spec(given, config)
    for sentence in misspelt(os.environ):
        show_message(sentence, "warning")
    if spec.logs.format == "json":
        use_log_format("json")
    return spec


@app.command()
@o.takes_settings(
    "models", "routers", "auth", "tls", "limits", "admin", "control", "ray", "cluster", "logs",
    without=("ray_address", "ray_no_auth"),
)  # fmt: skip
def serve(given: dict[str, Any], config: o.Config = None) -> None:
    """Start everything on this machine: Ray, controller, replicas, router."""
    from headrace_cluster.launch.serve import Serve

    raise typer.Exit(Serve(_spec(given, config), spec_file=config_file(config)).run())


def _joined(spec: ClusterSpec) -> ClusterSpec:
    """As `headrace controller` uses it."""
    ray, control = spec.ray, spec.control
    if ray.address is None:
        ray = ray.model_copy(update={"address": "auto"})
    if control.port is None:  # routers find the next one at the same port
        control = control.model_copy(update={"port": CONTROL_PORT})
    return spec.model_copy(update={"ray": ray, "control": control})


@app.command()
@o.takes_settings("models", "tls", "admin", "control", "ray", "cluster", "logs")
def controller(
    given: dict[str, Any],
    config: o.Config = None,
    take_over: Annotated[
        bool,
        typer.Option("--take-over", help="Although another controller of the cluster acts, with other models."),
    ] = False,
    config_stdin: Annotated[bool, typer.Option("--config-stdin", hidden=True)] = False,
    parent: Annotated[int, typer.Option("--parent", hidden=True)] = 0,
) -> None:
    """Start controller and replicas in a Ray that runs: on this node, or at --ray-address."""
    from headrace_cluster.launch.controller_run import check_spec, run_controller, run_from_stdin

    if config_stdin:
        return run_from_stdin(parent)
    from headrace_cluster.controller.spec_file import SpecFile, digest

    path = config_file(config)
    content = digest(path) if path is not None else b""  # before it is read
    spec, file = _joined(_spec(given, config)), None
    if path is not None:
        file = SpecFile(path, content, spec, lambda: _joined(build_spec(given, config)), check_spec)
    run_controller(spec, file, take_over=take_over)


@app.command()
@o.takes_settings("routers", "auth", "tls", "limits", "secret_file", "log_format", without=("routers",))
def router(
    given: dict[str, Any],
    controller: Annotated[str | None, typer.Option("--controller", help="HOST:PORT of the controller.")] = None,
    config: o.Config = None,
    config_stdin: Annotated[bool, typer.Option("--config-stdin", hidden=True)] = False,
    parent: Annotated[int, typer.Option("--parent", hidden=True)] = 0,
) -> None:
    """Start a router alone; it receives the list of replicas from a controller."""
    from headrace_cluster.launch.routers import run_from_stdin, run_router

    if config_stdin:
        raise typer.Exit(run_from_stdin(parent))
    if controller is None:
        raise typer.BadParameter("name the controller: --controller HOST:PORT")
    raise typer.Exit(run_router(_spec(given, config), controller))


@config_app.command("show")
@o.takes_settings("models", "routers", "auth", "tls", "limits", "admin", "control", "ray", "cluster", "logs")
def config_show(given: dict[str, Any], config: o.Config = None) -> None:
    """Print the spec that flags, environment and file make together, as YAML."""
    import yaml

    document = _spec(given, config).model_dump(mode="json")
    sys.stdout.write(yaml.safe_dump(document, sort_keys=False, allow_unicode=True))


@config_app.command("schema")
def config_schema() -> None:
    """Print the JSON schema of the spec."""
    import json

    from headrace_cluster.spec.schema import spec_schema

    print(json.dumps(spec_schema(), indent=2))

"""All commands in one application. Each is a function in one of these modules."""

import os
from pathlib import Path
from typing import Annotated

import typer

from headrace_cluster.cli import accuracy, agents, chat, logs, project, replicas, starting, status, stop
from headrace_cluster.simulator import cli as simulating

app = typer.Typer(
    name="headrace",
    help="Serve large language models on many GPUs, or on none.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (starting, chat, agents, status, logs, replicas, stop, accuracy, simulating, project):
    app.add_typer(module.app)


def _print_version(requested: bool) -> None:
    if requested:
        project.version()
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
    cluster: Annotated[
        str | None,
        typer.Option("--cluster", metavar="URL", help="Of the admin API of a cluster elsewhere."),
    ] = None,
    admin_key_file: Annotated[Path | None, typer.Option("--admin-key-file", help="File with its key.")] = None,
) -> None:
    """Options before a command. Commands read them from the environment, as those that are set there."""
    if cluster is not None:
        os.environ["HEADRACE_SERVER"] = cluster
    if admin_key_file is not None:
        os.environ["HEADRACE_SERVER_KEY_FILE"] = str(admin_key_file)

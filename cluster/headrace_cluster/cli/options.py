"""Flags that several commands share."""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace_cluster.cli.servers import ServerChoice
from headrace_cluster.errors import SpecError
from headrace_cluster.spec.flag import ARGUMENT, Setting
from headrace_cluster.spec.settings import SETTINGS, from_environment

Config = Annotated[Path | None, typer.Option("--config", "-f", help="A cluster spec in YAML.")]
Replica = Annotated[str, typer.Argument(metavar="REPLICA", help="As `status` names it.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the document for programs.")]
Command = Callable[..., None]


def takes_settings(*sections: str, without: tuple[str, ...] = ()) -> Callable[[Command], Command]:
    """Adds to a command a flag for each setting of these sections of the spec, or of these names.

    The command gets what was given as its first argument, by name of the setting.
    """
    chosen = [
        setting
        for setting in SETTINGS
        if (setting.path[0] in sections or setting.name in sections) and setting.name not in without
    ]

    def first_argument(arguments: dict[str, Any]) -> dict[str, Any]:
        given = {setting.name: arguments.pop(setting.name) for setting in chosen}
        return {name: value for name, value in given.items() if value is not None}

    return lambda command: _with_options(command, [_parameter(setting) for setting in chosen], first_argument)


def takes_server(*, named: bool = False) -> Callable[[Command], Command]:
    """Adds to a command the flags that choose a server; the ServerChoice is its first argument.

    named: also the argument SERVER.
    """
    declared = [*inspect.signature(choice, eval_str=True).parameters.values()][: 4 if named else 3]

    def first_argument(arguments: dict[str, Any]) -> ServerChoice:
        return choice(**{each.name: arguments.pop(each.name) for each in declared})

    return lambda command: _with_options(command, declared, first_argument)


def _with_options(
    command: Command, options: list[inspect.Parameter], first_argument: Callable[[dict[str, Any]], Any]
) -> Command:
    """The command as Typer reads it: with these options in place of its first argument, which is made of them."""
    _, *own = inspect.signature(command, eval_str=True).parameters.values()

    def run(**arguments: Any) -> None:
        command(first_argument(arguments), **arguments)

    required = inspect.Parameter.empty
    parameters = sorted(
        [*own, *options], key=lambda each: (each.default is not required, each.name not in ("model", "config"))
    )
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def _parameter(setting: Setting) -> inspect.Parameter:
    """A setting as Typer reads it from a signature. None = not given."""
    words = setting.help if setting.help.startswith("gRPC") else setting.help[0].upper() + setting.help[1:]
    about: dict[str, Any] = {"help": words, "metavar": setting.values or None}
    if setting.flag == ARGUMENT:
        declared = typer.Argument(**about | {"metavar": f"[{ARGUMENT}]"})
    elif setting.kind is bool:
        declared = typer.Option(*setting.flags, is_flag=True, **about)
    else:
        declared = typer.Option(*setting.flags, **about)
    kind: Any = setting.kind
    annotation = Annotated[kind | None, declared]
    return inspect.Parameter(setting.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=None, annotation=annotation)


def choice(
    port: Annotated[
        int | None, typer.Option("--port", help="Any port of the server; needed when several servers run.")
    ] = None,
    admin_port: Annotated[int | None, typer.Option("--admin-port", help="The server's admin port.")] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster", metavar="NAME", help="Its cluster, or one of its models; elsewhere the URL of its admin API."
        ),
    ] = None,
    server: Annotated[
        str | None, typer.Argument(metavar="[SERVER]", help="Its cluster, model or port. [default: the only one]")
    ] = None,
) -> ServerChoice:
    """The server of a client command: of its flags, or without any, of HEADRACE_PORT and so on. Raises SpecError."""
    given: dict[str, Any] = {"--port": port, "--admin-port": admin_port, "--cluster": cluster, "SERVER": server}
    given = {name: value for name, value in given.items() if value is not None}
    if not given and (url := os.environ.get("HEADRACE_SERVER", "")):
        return ServerChoice(url=url)
    if not given:
        environment = from_environment(os.environ)
        cluster = environment.get("cluster")
        port, admin_port = (_number(environment, name) for name in ("port", "admin_port"))
        variables = {"PORT": port, "ADMIN_PORT": admin_port, "CLUSTER": cluster}
        given = {f"HEADRACE_{name}": value for name, value in variables.items() if value is not None}
    names = tuple(name for name in (cluster, server) if name is not None)
    for name in names:
        if name.startswith(("http://", "https://")):
            return ServerChoice(url=name)
    words = " and ".join(f"{name} {value}" for name, value in given.items()).replace("SERVER ", "the name or port ")
    return ServerChoice(port, admin_port, names, words)


def _number(environment: dict[str, str], name: str) -> int | None:
    """A port that is set in the environment; 0, any port, counts as none."""
    text = environment.get(name, "0")
    if not text.isdigit():
        raise SpecError(f"HEADRACE_{name.upper()} must be a number, not '{text}'")
    return int(text) or None

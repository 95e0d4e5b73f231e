"""Flags that several commands share."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from headrace_cluster.spec.flag import ARGUMENT, Setting
from headrace_cluster.spec.settings import SETTINGS

ServerPort = Annotated[
    int | None, typer.Option("--port", help="Any port of the server; needed when several servers run.")
]
ServerAdminPort = Annotated[int | None, typer.Option("--admin-port", help="The server's admin port.")]
ServerName = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME",
        help="Its cluster, or one of its models; elsewhere the URL of its admin API.",
    ),
]
Server = Annotated[
    str | None, typer.Argument(metavar="[SERVER]", help="Its cluster, model or port. [default: the only one]")
]
Config = Annotated[Path | None, typer.Option("--config", "-f", help="A cluster spec in YAML.")]
Replica = Annotated[str, typer.Argument(metavar="REPLICA", help="As `status` names it.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the document for programs.")]
ApiKey = Annotated[
    str | None, typer.Option("--api-key", envvar="HEADRACE_API_KEY", help="Key of the API, if it needs one.")
]
Ca = Annotated[
    Path | None,
    typer.Option(
        "--ca", envvar="HEADRACE_CA", help="Authorities that --host's certificate must be of (PEM); uses TLS."
    ),
]
ClientCert = Annotated[
    Path | None,
    typer.Option(
        "--client-cert", envvar="HEADRACE_CLIENT_CERT", help="Certificate and key, if the server requires one (PEM)."
    ),
]


def takes_settings(
    *sections: str, without: tuple[str, ...] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Adds to a command a flag for each setting of these sections of the spec, or of these names.

    The command gets what was given as its first argument, by name of the setting.
    """
    chosen = [
        setting
        for setting in SETTINGS
        if (setting.path[0] in sections or setting.name in sections) and setting.name not in without
    ]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        _, *own = inspect.signature(command, eval_str=True).parameters.values()

        def run(**arguments: Any) -> None:
            given = {setting.name: arguments.pop(setting.name) for setting in chosen}
            command({name: value for name, value in given.items() if value is not None}, **arguments)

        parameters = [*map(_parameter, chosen), *own]
        required = inspect.Parameter.empty
        parameters.sort(key=lambda each: (each.default is not required, each.name not in ("model", "config")))
        run.__name__, run.__doc__ = command.__name__, command.__doc__
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        return run

    return decorate


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


def choice(port: int | None, admin_port: int | None, cluster: str | None, server: str | None = None) -> Any:
    """The server choice of a client command: its flags, or without any, HEADRACE_PORT and so on. Raises SpecError."""
    import os

    from headrace_cluster.cli.servers import ServerChoice
    from headrace_cluster.errors import SpecError
    from headrace_cluster.spec.settings import from_environment

    given = {"--port": port, "--admin-port": admin_port, "--cluster": cluster, "SERVER": server}
    given = {name: value for name, value in given.items() if value is not None}
    if not given:
        environment = from_environment(os.environ)
        for name in ("port", "admin_port", "cluster"):
            value = environment.get(name, "0")
            if name != "cluster" and not value.isdigit():
                raise SpecError(f"HEADRACE_{name.upper()} must be a number, not '{value}'")
            if value != "0":  # any port
                given[f"HEADRACE_{name.upper()}"] = value if name == "cluster" else int(value)

    def value_of(flag: str, variable: str) -> Any:
        return given.get(flag, given.get(variable))

    names = (value_of("--cluster", "HEADRACE_CLUSTER"), server)
    urls = [name for name in names if name is not None and name.startswith(("http://", "https://"))]
    if not urls and not any(flag in given for flag in ("--port", "--admin-port", "--cluster", "SERVER")):
        urls = [url for url in (os.environ.get("HEADRACE_SERVER", ""),) if url]
    if urls:
        return ServerChoice(url=urls[0])
    return ServerChoice(
        port=value_of("--port", "HEADRACE_PORT"),
        admin_port=value_of("--admin-port", "HEADRACE_ADMIN_PORT"),
        names=tuple(name for name in names if name is not None),
        given=" and ".join(f"{name} {value}" for name, value in given.items()).replace("SERVER ", "the name or port "),
    )


def client_host(host: str | None) -> str | None:
    """The host to which `chat` connects, if given: flag > HEADRACE_HOST."""
    import os

    from headrace_cluster.spec.settings import from_environment

    return host or from_environment(os.environ).get("host")

"""Where a setting comes from: flag > environment (HEADRACE_*) > file > default."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_cluster.errors import SpecError
from headrace_cluster.spec import ClusterSpec, parse_spec

PREFIX = "HEADRACE_"


@dataclass(frozen=True, slots=True)
class Option:
    """A setting with a short form. `path` is its place in the spec; 'models' means: of the one model."""

    name: str
    path: tuple[str, ...]

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def flag(self) -> str:
        return "MODEL" if self.name == "model" else "--" + self.name.replace("_", "-")


def _model(name: str, *path: str) -> Option:
    return Option(name, ("models", *(path or (name,))))


OPTIONS = (
    _model("model", "source"),
    _model("served_model_name", "name"),
    *(_model(name) for name in ("revision", "replicas", "tp", "pp", "ep", "device", "dtype", "load_format")),
    *(_model(pool, pool, "replicas") for pool in ("prefill", "decode")),
    *(_model(f"{pool}_{name}", pool, name) for pool in ("prefill", "decode") for name in ("tp", "pp")),
    *(_model(name) for name in ("max_model_len", "kv_cache_memory", "block_size", "max_num_seqs")),
    *(_model(name) for name in ("max_num_batched_tokens", "cpu_threads", "cpu_share", "trust_remote_code")),
    *(_model(name) for name in ("async_scheduling", "cuda_graphs", "deterministic", "profile")),
    Option("host", ("routers", "host")),
    Option("port", ("routers", "port")),
    Option("grpc_port", ("routers", "grpc_port")),
    Option("routers", ("routers", "count")),
    *(Option(name, ("routers", name)) for name in ("migration_limit", "disaggregation", "rebalancing")),
    Option("admin_port", ("admin", "port")),
    Option("control_host", ("control", "host")),
    Option("control_port", ("control", "port")),
    Option("secret_file", ("control", "secret_file")),
    Option("api_keys_file", ("auth", "keys_file")),
    Option("allow_no_auth", ("auth", "allow_no_auth")),
    Option("ray_address", ("ray", "address")),
    Option("cluster", ("cluster",)),
)
_BY_VARIABLE = {option.variable: option for option in OPTIONS}

# Read elsewhere: by ./headrace, by the state folder, by client commands.
_OTHER_VARIABLES = {
    "HEADRACE_TORCH",
    "HEADRACE_VENV",
    "HEADRACE_PYTHON",
    "HEADRACE_HOME",
    "HEADRACE_CONFIG",
    "HEADRACE_ADMIN_KEY",
    "HEADRACE_API_KEY",
    "HEADRACE_API_KEYS",
    "HEADRACE_SERVE_ID",
}
# What Kubernetes tells every container about a Service named headrace or headrace-something.
_SERVICE_LINK = re.compile(r"HEADRACE_(.+_)?(SERVICE_(HOST|PORT(_.+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")


def from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Settings among environment variables, by option name; empty ones count as absent."""
    found: dict[str, str] = {}
    for variable, option in _BY_VARIABLE.items():
        value = environ.get(variable, "").strip()
        if value and not _from_kubernetes(variable, value):
            found[option.name] = value
    return found


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each HEADRACE_ variable that sets nothing: most likely a slip of the pen."""
    return [
        f"the environment variable {variable} sets nothing{_near(variable)}"
        for variable, value in environ.items()
        if variable.startswith(PREFIX)
        and variable not in _BY_VARIABLE
        and variable not in _OTHER_VARIABLES
        and not _from_kubernetes(variable, value)
    ]


def _from_kubernetes(variable: str, value: str) -> bool:
    is_url = variable.endswith("_PORT") and _SERVICE_URL.match(value) is not None
    return is_url or _SERVICE_LINK.fullmatch(variable) is not None


def read_file(path: Path) -> dict[str, Any]:
    """A spec file as plain data: YAML, of which JSON is a part. Raises SpecError."""
    import yaml

    try:
        data = _loader()(path.read_text(encoding="utf-8")).get_single_data()
    except OSError as error:
        raise SpecError(f"the config file {path} cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(f"the config file {path} is not YAML: {' '.join(str(error).split())}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise SpecError(
            f"the config file {path} must hold keys and values, such as 'models:' (see `headrace config schema`)"
        )
    return data


def build_spec(
    flags: Mapping[str, Any], config: Path | None = None, environ: Mapping[str, str] | None = None
) -> ClusterSpec:
    """The spec that all sources together describe. Raises SpecError.

    flags: by option name; None = not given.
    """
    environ = os.environ if environ is None else environ
    if config is None and environ.get("HEADRACE_CONFIG", "").strip():
        config = Path(environ["HEADRACE_CONFIG"].strip())
    data = read_file(config) if config is not None else {}
    given: dict[str, Any] = dict(from_environment(environ))
    keys = [key.strip() for key in environ.get("HEADRACE_API_KEYS", "").split(",") if key.strip()]
    if keys:
        _section(data, "auth")["keys"] = keys
    given |= {name: value for name, value in flags.items() if value is not None}
    for option in OPTIONS:
        if option.name in given:
            _place(data, option, given[option.name])
    return parse_spec(data)


def _place(data: dict[str, Any], option: Option, value: Any) -> None:
    if option.path[0] == "models":
        models = data.setdefault("models", [{}])
        if not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
            raise SpecError("models: this must be a list of models, each with keys such as 'source'")
        if len(models) != 1:
            raise SpecError(
                f"{option.flag} (or {option.variable}) is for one model, but the config file lists {len(models)}: "
                "set it there"
            )
        _set(models[0], option.path[1:], value)
    else:
        _set(data, option.path, value)


def _set(data: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    target = data
    for part in path[:-1]:
        target = _section(target, part)
    target[path[-1]] = value


def _section(data: dict[str, Any], name: str) -> dict[str, Any]:
    if data.get(name) is None:
        data[name] = {}
    section = data[name]
    if not isinstance(section, dict):
        raise SpecError(f"{name}: this must hold keys and values")
    return section


def _near(variable: str) -> str:
    from difflib import get_close_matches

    close = get_close_matches(variable, _BY_VARIABLE, n=1)
    return f" (did you mean {close[0]}?)" if close else ""


def _loader() -> Any:
    """YAML's safe loader class, but a key that stands twice is an error instead of a silent loss."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    def mapping(loader: Any, node: Any) -> Any:
        seen = set()
        for key_node, _ in node.value:
            key = loader.construct_object(key_node, deep=True)
            if isinstance(key, str | int) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key}' stands twice", key_node.start_mark
                )
            seen.add(str(key) if not isinstance(key, str | int) else key)
        return loader.construct_mapping(node, deep=True)

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    return Loader

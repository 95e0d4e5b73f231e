"""Sources of a setting, by precedence: flag > environment (HEADRACE_*) > file > default."""

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace_cluster.errors import SpecError
from headrace_cluster.program import program_name
from headrace_cluster.spec.cluster_spec import ClusterSpec, parse_spec
from headrace_cluster.spec.flag import PREFIX, Setting, settings_of
from headrace_proto.private_file import read_private

SETTINGS = tuple(settings_of(ClusterSpec))
_BY_VARIABLE = {setting.variable: setting for setting in SETTINGS}

# Read elsewhere: by ./headrace, the state folder, client commands and the kernels. A test compares them with the code.
OTHER_VARIABLES = {
    "HEADRACE_TORCH",
    "HEADRACE_VENV",
    "HEADRACE_PYTHON",
    "HEADRACE_HOME",
    "HEADRACE_CONFIG",
    "HEADRACE_ADMIN_KEY",
    "HEADRACE_API_KEY",
    "HEADRACE_API_KEYS",
    "HEADRACE_CA",
    "HEADRACE_CLIENT_CERT",
    "HEADRACE_METRICS_KEY",
    "HEADRACE_SERVER",
    "HEADRACE_SERVER_KEY_FILE",
    "HEADRACE_SERVE_ID",
    "HEADRACE_COMMAND",
    "HEADRACE_CPU_KERNELS",
    "HEADRACE_TRITON",
}
# Variables that Kubernetes sets in every container for a Service named headrace or headrace-something.
_SERVICE_LINK = re.compile(r"HEADRACE_(.+_)?(SERVICE_(HOST|PORT(_.+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)")
_SERVICE_URL = re.compile(r"(tcp|udp|sctp)://")


def from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Settings among environment variables, by setting name; empty ones count as absent."""
    found: dict[str, str] = {}
    for variable, setting in _BY_VARIABLE.items():
        value = environ.get(variable, "").strip()
        if value and not _from_kubernetes(variable, value):
            found[setting.name] = value
    return found


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """A sentence for each HEADRACE_ variable that sets nothing: most likely a typo."""
    return [
        f"the environment variable {variable} sets nothing{_near(variable)}"
        for variable, value in environ.items()
        if variable.startswith(PREFIX)
        and variable not in _BY_VARIABLE
        and variable not in OTHER_VARIABLES
        and not _from_kubernetes(variable, value)
    ]


def _from_kubernetes(variable: str, value: str) -> bool:
    is_url = variable.endswith("_PORT") and _SERVICE_URL.match(value) is not None
    return is_url or _SERVICE_LINK.fullmatch(variable) is not None


def read_file(path: Path) -> dict[str, Any]:
    """A spec file as plain data: YAML, a superset of JSON. Raises SpecError."""
    import yaml

    try:
        data = _loader()(path.read_text(encoding="utf-8")).get_single_data()
    except OSError as error:
        raise SpecError(f"the config file {path} cannot be read: {error.strerror}; pass another with -f") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(f"the config file {path} is not YAML: {_yaml_problem(error)}; correct it there") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise SpecError(
            f"the config file {path} must hold keys and values, such as 'models:' "
            f"(see `{program_name()} config schema`)"
        )
    return data


def build_spec(
    flags: Mapping[str, Any],
    config: Path | None = None,
    environ: Mapping[str, str] | None = None,
    warn: Callable[[str], None] = lambda sentence: None,
) -> ClusterSpec:
    """The spec from all sources. Raises SpecError, and PrivateFileError if others can read a file with keys.

    flags: by setting name; None = not given. warn: gets a sentence per source that sets nothing: most likely a mistake.
    """
    environ = os.environ if environ is None else environ
    config = config_file(config, environ)
    data = read_file(config) if config is not None else {}
    if config is not None and not data:
        warn(f"the config file {config} is empty: it sets nothing")
    if config is not None and _holds_keys(data):
        read_private(config, "the config file with keys")
    for sentence in unknown_variables(environ):
        warn(sentence)
    given: dict[str, Any] = dict(from_environment(environ))
    keys = [key.strip() for key in environ.get("HEADRACE_API_KEYS", "").split(",") if key.strip()]
    if keys:
        _section(data, "auth")["keys"] = keys
    if metrics_key := environ.get("HEADRACE_METRICS_KEY", "").strip():
        _section(data, "auth")["metrics_key"] = metrics_key
    given |= {name: value for name, value in flags.items() if value is not None}
    origins: dict[tuple[str | int, ...], str] = {}
    for setting in SETTINGS:
        if setting.name in given:
            _place(data, setting, given[setting.name])
            path: tuple[str | int, ...] = setting.path
            place = ("models", 0, *path[1:]) if path[0] == "models" else path
            origins[place] = setting.flag if flags.get(setting.name) is not None else setting.variable
    return parse_spec(data, origins)


def config_file(given: Path | None, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The spec file: of -f, else of HEADRACE_CONFIG."""
    named = environ.get("HEADRACE_CONFIG", "").strip()
    return given or (Path(named) if named else None)


def _holds_keys(data: Mapping[str, Any]) -> bool:
    auth = data.get("auth")
    return isinstance(auth, dict) and bool(auth.get("keys") or auth.get("metrics_key"))


def _yaml_problem(error: Exception) -> str:
    """'line 2, column 3: mapping values are not allowed here'."""
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


def _place(data: dict[str, Any], setting: Setting, value: Any) -> None:
    if setting.path[0] == "models":
        models = data.setdefault("models", [{}])
        if not isinstance(models, list) or not all(isinstance(model, dict) for model in models):
            raise SpecError("models: this must be a list of models, each with keys such as 'source'")
        if len(models) != 1:
            raise SpecError(
                f"{setting.flag} (or {setting.variable}) is for one model, but the config file lists {len(models)}: "
                "set it there"
            )
        _set(models[0], setting.path[1:], value)
    else:
        _set(data, setting.path, value)


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
    """YAML's safe loader class, with an error for a duplicate key, which YAML would silently drop."""
    import yaml

    class Loader(yaml.SafeLoader):
        pass

    def mapping(loader: Any, node: Any) -> Any:
        seen = set()
        for key_node, _ in node.value:
            key = loader.construct_object(key_node, deep=True)
            if isinstance(key, str | int) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key '{key}' is given twice", key_node.start_mark
                )
            seen.add(str(key) if not isinstance(key, str | int) else key)
        return loader.construct_mapping(node, deep=True)

    Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, mapping)
    return Loader

"""Sources of a setting, by precedence: flag > environment (HEADRACE_*) > file > default."""

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from headrace_base.private_file import read_private
from headrace_cluster.errors import SpecError
from headrace_cluster.program import program_name
from headrace_cluster.spec.cluster_spec import ClusterSpec, parse_spec
from headrace_cluster.spec.flag import PREFIX, settings_of

SETTINGS = tuple(settings_of(ClusterSpec))

# Kubernetes sets HEADRACE_PORT to tcp://… in every container beside a Service named headrace.
_SERVICE_URLS = ("tcp://", "udp://", "sctp://")
_OTHER_VARIABLES = ("API_KEY", "API_KEYS", "METRICS_KEY", "ADMIN_KEY", "CONFIG", "HOME", "SERVER", "CA", "CLIENT_CERT")
_NEAR = 0.9  # least similarity (0..1) at which a name counts as a misspelling of another


def from_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Settings among environment variables, by setting name; empty ones count as absent."""
    given = {setting.name: environ.get(setting.variable, "").strip() for setting in SETTINGS}
    return {name: value for name, value in given.items() if value and not value.startswith(_SERVICE_URLS)}


def misspelt(environ: Mapping[str, str]) -> list[str]:
    """A sentence about each variable that is none of ours, but nearly one. Kubernetes adds others that begin alike."""
    known = [setting.variable.removeprefix(PREFIX) for setting in SETTINGS] + list(_OTHER_VARIABLES)
    found = []
    for name in sorted(environ):
        key = name.removeprefix(PREFIX)
        if name.startswith(PREFIX) and key not in known and (near := get_close_matches(key, known, 1, _NEAR)):
            found.append(f"{name} is not a setting, and not used: did you mean {PREFIX}{near[0]}?")
    return found


def read_file(path: Path) -> dict[str, Any]:
    """A spec file as plain data: YAML, a superset of JSON. Raises SpecError."""
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key that is given twice, of which YAML would keep the last value."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            seen: list[Any] = []
            for key, _ in node.value:
                if key.value in seen:
                    raise yaml.MarkedYAMLError(None, None, f"the key '{key.value}' is given twice", key.start_mark)
                seen.append(key.value)
            return super().construct_mapping(node, deep)

    try:
        with path.open(encoding="utf-8") as file:  # with a file the error quotes no line, which may have a key
            data = Loader(file).get_single_data()
    except OSError as error:
        raise SpecError(f"the config file {path} cannot be read: {error.strerror}; pass another with -f") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SpecError(f"the config file {path} is not YAML: {' '.join(str(error).split())}") from error
    if data is not None and not isinstance(data, dict):
        raise SpecError(
            f"the config file {path} must hold keys and values, such as 'models:' "
            f"(see `{program_name()} config schema`)"
        )
    return data or {}


def build_spec(
    flags: Mapping[str, Any], config: Path | None = None, environ: Mapping[str, str] = os.environ
) -> ClusterSpec:
    """The spec from all sources. Raises SpecError, and PrivateFileError if others can read a file with keys.

    flags: by setting name; None = not given.
    """
    config = config_file(config, environ)
    data = read_file(config) if config is not None else {}
    auth = data.get("auth")
    if config is not None and isinstance(auth, dict) and (auth.get("keys") or auth.get("metrics_key")):
        read_private(config, "the config file with keys")
    keys = [key.strip() for key in environ.get("HEADRACE_API_KEYS", "").split(",") if key.strip()]
    if keys:
        _put(data, ("auth", "keys"), keys, "HEADRACE_API_KEYS")
    if metrics_key := environ.get("HEADRACE_METRICS_KEY", "").strip():
        _put(data, ("auth", "metrics_key"), metrics_key, "HEADRACE_METRICS_KEY")
    by_flag = {name: value for name, value in flags.items() if value is not None}
    given = from_environment(environ) | by_flag
    origins: dict[tuple[str | int, ...], str] = {}
    for setting in SETTINGS:
        if setting.name in given:
            source = setting.flag if setting.name in by_flag else setting.variable
            _put(data, setting.path, given[setting.name], source)
            section, *rest = setting.path
            origins[("models", 0, *rest) if section == "models" else setting.path] = source
    return parse_spec(data, origins)


def config_file(given: Path | None, environ: Mapping[str, str] = os.environ) -> Path | None:
    """The spec file: of -f, else of HEADRACE_CONFIG."""
    named = environ.get("HEADRACE_CONFIG", "").strip()
    return given or (Path(named) if named else None)


def _put(data: dict[str, Any], path: tuple[str, ...], value: Any, source: str) -> None:
    """Sets the value at a path, of the only model below 'models'. source: the flag or the variable."""
    *sections, key = path
    target: Any = data
    for name in sections:
        target[name] = target.get(name) or ([{}] if name == "models" else {})
        target = target[name]
        if isinstance(target, list):
            if len(target) > 1:
                raise SpecError(
                    f"{source} is for one model, but the config file lists {len(target)}: set it in the file"
                )
            target = target[0]
        if not isinstance(target, dict):
            raise SpecError(f"{name}: this must hold keys and values")
    target[key] = value

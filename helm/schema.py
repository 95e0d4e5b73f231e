"""Writes `values.schema.json` and the table of values in the chart's README.

    python helm/schema.py

The part of `spec` is the schema of the cluster spec, without the keys that the chart sets itself. The other values have
the types and comments of `values.yaml`, and the rules of RULES.
"""

import json
import re
from pathlib import Path
from typing import Any

import yaml

from headrace_cluster.spec.schema import spec_schema

Schema = dict[str, Any]
CHART = Path(__file__).parent / "headrace"
MARK = "<!-- values: made by helm/schema.py -->\n"
# Keys of the cluster spec that the chart sets; a value for one of them would break the pods.
_ADDRESSES = ("host", "port", "grpc_port", "count", "metrics_port", "metrics_host", "metrics_no_auth")
OWNED = {
    "ClusterSpec": ("ray", "control", "admin", "auth", "tls"),
    "RoutersSpec": (*_ADDRESSES, "leave_seconds", "shutdown_seconds"),
}
_LINE = re.compile(r"( *)([A-Za-z]+):(?: .*?)??(?:  ?# (.+))?")
_NAME: Schema = {"pattern": "^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$"}
_DIGEST: Schema = {"pattern": "^(sha256:[0-9a-f]{64})?$"}
_QUANTITY: Schema = {"pattern": r"^[0-9]+(\.[0-9]+)?([KMGT]i?)?$"}
_SHM: Schema = {"pattern": "^[0-9]+[MG]i$"}
_TEXTS: Schema = {"items": {"type": "string"}}
_TEXT_MAP: Schema = {"additionalProperties": {"type": "string"}}
_ANY: Schema = {"type": "object"}
_RESOURCES: Schema = {"properties": {"requests": _ANY, "limits": _ANY}, "additionalProperties": False}


def _between(least: int, most: int) -> Schema:
    return {"minimum": least, "maximum": most}


# Of the keys with these last parts of their paths.
RULES: dict[str, Schema] = {
    **dict.fromkeys(("className", "existingClaim", "existingSecret"), _NAME),
    **dict.fromkeys(("priorityClassName", "serviceAccountName", "storageClass"), _NAME),
    **dict.fromkeys(("digest.router", "digest.workerCpu", "digest.workerCuda"), _DIGEST),
    **dict.fromkeys(("annotations", "labels", "nodeSelector"), _TEXT_MAP),
    **dict.fromkeys(("capabilities", "grpcHostnames", "hostnames", "pullSecrets"), _TEXTS),
    **dict.fromkeys(("memory", "size"), _QUANTITY),
    **dict.fromkeys(("resources", "controllerResources"), _RESOURCES),
    **dict.fromkeys(("httpPort", "grpcPort"), _between(1, 65535)),
    **dict.fromkeys(("router.replicas", "min", "max"), _between(1, 1024)),
    "accessMode": {"enum": ["ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"]},
    "autoscaling.cpu": _between(1, 1000),
    "cpus": _between(1, 1024),  # `ray start` takes whole numbers
    "drainSeconds": _between(1, 86400),
    "gpus": _between(0, 64),
    "minAvailable": _between(0, 1024),
    "mountPath": {"pattern": "^/."},
    "leaveSeconds": _between(1, 300),
    "pullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
    "runtimeClassName": _NAME,
    "registry": {"pattern": "^([^:]|:[0-9])*$"},  # host and path, without https://
    "service.type": {"enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
    "shm": _SHM,
    "storage": {"enum": ["rocksdb", "none"]},
    "workerDefaults.replicas": _between(0, 1024),
}
# Maps of Kubernetes, which it checks itself, and those of the chart with keys that users choose.
_WHOLE = ("spec", "workers", "resources", "controllerResources", "podSecurityContext")


def values_schema() -> Schema:
    """The JSON schema of the chart's values."""
    schema = _section(_defaults(), "", _descriptions())
    keys: Schema = schema["properties"]
    spec, definitions = _spec()
    keys["spec"] = spec | {"description": keys["spec"]["description"]}
    group = {"anyOf": [keys["workerDefaults"], {"type": "null"}]}  # null removes a group of another values file
    names = {"pattern": "^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$"}
    keys["workers"] |= {"propertyNames": names, "additionalProperties": group}
    keys["global"] = {"type": "object", "description": "set by a chart that contains this one, and not used"}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": definitions, **schema}


def schema_text() -> str:
    """The content of `values.schema.json`."""
    return json.dumps(values_schema(), indent=1, ensure_ascii=False) + "\n"


def readme() -> str:
    """The chart's README with a current table of values, which stands between two marks."""
    before, _, after = (CHART / "README.md").read_text(encoding="utf-8").split(MARK)
    rows = "\n".join(_rows(values_schema(), _defaults(), ""))
    return f"{before}{MARK}| value | default | what it is |\n| --- | --- | --- |\n{rows}\n{MARK}{after}"


def _defaults() -> dict[str, Any]:
    defaults: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    return defaults


def _descriptions() -> dict[str, str]:
    """The comments of `values.yaml` by the path of their key."""
    found: dict[str, str] = {}
    path: list[str] = []
    for line in (CHART / "values.yaml").read_text(encoding="utf-8").splitlines():
        if match := _LINE.fullmatch(line):
            path = [*path[: len(match[1]) // 2], match[2]]
            if match[3]:
                found[".".join(path)] = match[3]
    return found


def _section(defaults: dict[str, Any], path: str, descriptions: dict[str, str]) -> Schema:
    """A closed object with these keys. Raises KeyError if one of them has no comment."""
    keys = {name: _value(default, f"{path}{name}", descriptions) for name, default in defaults.items()}
    return {"type": "object", "properties": keys, "additionalProperties": False}


def _value(default: Any, path: str, descriptions: dict[str, str]) -> Schema:
    name = path.rpartition(".")[2]
    if isinstance(default, dict) and default and name not in _WHOLE:
        about = {"description": descriptions[path]} if path in descriptions else {}
        return _section(default, f"{path}.", descriptions) | about
    rules = [rule for key, rule in RULES.items() if f".{path}".endswith(f".{key}")]
    items = {"items": _ANY} if isinstance(default, list) else {}
    types = {bool: "boolean", int: "integer", str: "string", list: "array", dict: "object"}
    schema = {"type": types[type(default)], **items, "description": descriptions[path]}
    return schema | (rules[0] if rules else {})


def _spec() -> tuple[Schema, Schema]:
    """The schema of `spec`, and the definitions that it refers to."""
    schema = spec_schema()
    definitions: Schema = schema.pop("$defs")
    for name, section in {"ClusterSpec": schema, **definitions}.items():
        for key in OWNED.get(name, ()):
            del section["properties"][key]
        for field in section["properties"].values():
            field.pop("flag", None)  # for the command line only
            field.pop("help", None)
    used = json.dumps([schema, definitions])
    return schema, {name: section for name, section in definitions.items() if f'"#/$defs/{name}"' in used}


def _rows(schema: Schema, defaults: dict[str, Any], path: str) -> list[str]:
    rows: list[str] = []
    for name, entry in schema["properties"].items():
        inner = "properties" in entry and name not in _WHOLE
        if "description" in entry:
            shown = "" if name == "global" or inner or name in _WHOLE else f"`{json.dumps(defaults[name])}`"
            rows.append(f"| `{path}{name}` | {shown} | {entry['description']} |")
        if inner:
            rows += _rows(entry, defaults[name], f"{path}{name}.")
    return rows


if __name__ == "__main__":
    (CHART / "values.schema.json").write_text(schema_text(), encoding="utf-8")
    (CHART / "README.md").write_text(readme(), encoding="utf-8")

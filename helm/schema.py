"""Writes what is made from the cluster spec: `values.schema.json` and the table of values in the chart's README.

    python helm/schema.py

The spec's part comes from the pydantic models, without the keys that the chart owns; the rest is declared here.
"""

import json
from pathlib import Path
from typing import Any

import yaml

from headrace_cluster.spec.schema import spec_schema

Schema = dict[str, Any]
CHART = Path(__file__).parent / "headrace"
# The chart sets these keys; a value for one of them would break the pods.
OWNED = {
    "ClusterSpec": ("ray", "control", "admin", "auth", "tls"),
    "RoutersSpec": (
        *("host", "port", "grpc_port", "count", "metrics_port", "metrics_host", "metrics_no_auth", "shutdown_seconds"),
    ),
}
QUANTITY = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?([KMGT]i?)?$"}
SHM = {"type": "string", "pattern": "^[0-9]+[MG]i$"}
NAME = {"type": "string", "pattern": "^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$"}
TEXT, FLAG, MAP = {"type": "string"}, {"type": "boolean"}, {"type": "object"}
OBJECTS = {"type": "array", "items": MAP}
STRINGS = {"type": "array", "items": TEXT}
TEXTS = {"type": "object", "additionalProperties": TEXT}
RESOURCES = {"type": "object", "properties": {"requests": MAP, "limits": MAP}, "additionalProperties": False}


def _number(least: int, most: int = 1024) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


def _section(**properties: tuple[Schema, str] | Schema) -> Schema:
    """A closed object; each property is a schema, or a schema and its description for the table of values."""
    entries = {
        name: entry if isinstance(entry, dict) else entry[0] | {"description": entry[1]}
        for name, entry in properties.items()
    }
    return {"type": "object", "properties": entries, "additionalProperties": False}


def _scheduled(**properties: tuple[Schema, str] | Schema) -> Schema:
    return _section(
        **properties,
        nodeSelector=(TEXTS, "labels of the Kubernetes nodes for these pods"),
        tolerations=(OBJECTS, "taints of nodes that these pods accept"),
        affinity=(MAP, "affinity of these pods"),
        priorityClassName=(NAME, "their PriorityClass"),
    )


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
    schema["description"] = "the cluster spec of the command line, `headrace config schema`, without what the chart sets"
    used = json.dumps([schema, definitions])
    return schema, {name: section for name, section in definitions.items() if f'"#/$defs/{name}"' in used}


def values_schema() -> Schema:
    """The JSON schema of the chart's values."""
    spec, definitions = _spec()
    worker = _scheduled(
        replicas=(_number(0), "pods of the group"),
        gpus=(_number(0, 64), "GPUs of one pod; with any, the image is `image.workerCuda`"),
        gpuResource=(TEXT, "resource name of these GPUs"),
        cpus=({"type": "number", "exclusiveMinimum": 0}, "CPUs of one pod, which Ray divides among ranks on CPUs"),
        memory=(QUANTITY, "memory of one pod, `/dev/shm` included"),
        shm=(SHM, "size of `/dev/shm`; 1Gi or more where tp is above 1"),
        drainSeconds=(_number(0, 86400), "that a pod that is to end may serve what is in flight"),
        readOnlyRootFilesystem=(FLAG, "false where a driver of GPUs writes into the root file system"),
        runtimeClassName=(NAME, "RuntimeClass of the pods, such as nvidia"),
        capabilities=(STRINGS, "added capabilities, such as IPC_LOCK for InfiniBand"),
        resources=(RESOURCES, "merged over what cpus, memory and gpus give, such as devices of a network"),
    )
    schema = _section(
        nameOverride=(TEXT, "replaces headrace in names"),
        fullnameOverride=(TEXT, "the whole name of the release's objects, at most 40 characters"),
        image=_section(
            registry=(TEXT, "host and path before the names of the images"),
            router=(TEXT, "image of the routers"),
            workerCpu=(TEXT, "image of the head, and of workers without GPUs"),
            workerCuda=(TEXT, "image of workers with GPUs"),
            tag=(TEXT, "tag of the images; empty = the chart's appVersion"),
            digest=(_section(router=TEXT, workerCpu=TEXT, workerCuda=TEXT), "sha256:… of each image, instead of a tag"),
            pullPolicy=({"enum": ["Always", "IfNotPresent", "Never"]}, "when images are pulled"),
            pullSecrets=(STRINGS, "names of Secrets for the registry"),
        ),
        rayVersion=(TEXT, "version of Ray in the images"),
        spec=spec,
        auth=_section(
            enabled=(FLAG, "require an API key; false serves everyone who reaches the Service"),
            existingSecret=(NAME, "Secret with cluster-secret, metrics-key and api-keys; empty = one is made once"),
        ),
        tls=_section(
            existingSecret=(NAME, "Secret with tls.crt and tls.key for HTTP and gRPC; empty = no TLS"),
            clientCa=(FLAG, "require client certificates of the authorities in ca.crt of that Secret"),
        ),
        hub=_section(
            existingSecret=(NAME, "Secret with `token`, for private models of the Hub"),
            offline=(FLAG, "never contact the Hub"),
        ),
        router=_scheduled(
            replicas=(_number(1), "router pods without autoscaling"),
            autoscaling=_section(
                enabled=(FLAG, "scale the routers by their CPU"),
                min=(_number(1), "router pods at least"),
                max=(_number(1), "router pods at most"),
                cpu=(_number(1, 100), "target of their CPU in percent of the request"),
            ),
            preStopSeconds=(_number(1, 300), "that a router serves on while proxies learn that it ends"),
            minAvailable=(_number(0), "routers that a drain of nodes leaves; no budget where there are no more"),
            topologyKey=(TEXT, "label of nodes over which routers are spread"),
            resources=(RESOURCES, "of a router; memory: 170Mi, spec.limits.total_body_bytes and tokenizing"),
        ),
        head=_scheduled(
            shm=(SHM, "size of `/dev/shm` of the head pod"),
            resources=(RESOURCES, "of Ray's head"),
            controllerResources=(RESOURCES, "of the controller"),
        ),
        gcs=_section(
            storage=({"enum": ["rocksdb", "none"]}, "rocksdb: the state of Ray's head is kept; none: all ends with it"),
            existingClaim=(NAME, "PersistentVolumeClaim for that state; empty = one is made"),
            size=(QUANTITY, "size of the claim that is made"),
            storageClass=(NAME, "its StorageClass; empty = the default one"),
        ),
        workerDefaults=(worker, "values of each group in `workers` that sets none itself"),
        workers={
            "description": "groups of worker pods by name, each with the keys of `workerDefaults`; a model runs on one by "
            "node_labels: {headrace.dev/group: NAME}",
            "type": "object",
            "propertyNames": {"pattern": "^[a-z]([a-z0-9-]{0,18}[a-z0-9])?$"},
            "additionalProperties": {"anyOf": [worker, {"type": "null"}]},
        },
        models=_section(
            existingClaim=(NAME, "PersistentVolumeClaim with folders of models, mounted read-only in workers"),
            mountPath=({"type": "string", "pattern": "^/."}, "where; spec.models[].source is a folder below it"),
        ),
        cache=_section(
            enabled=(FLAG, "a volume for downloads from the Hub, shared by the workers"),
            existingClaim=(NAME, "its PersistentVolumeClaim; empty = one is made"),
            size=(QUANTITY, "size of the claim that is made"),
            storageClass=(NAME, "its StorageClass; empty = the default one"),
            accessMode=({"enum": ["ReadWriteMany", "ReadWriteOnce", "ReadWriteOncePod"]}, "its access mode"),
        ),
        service=_section(
            type=({"enum": ["ClusterIP", "NodePort", "LoadBalancer"]}, "type of the Service for clients"),
            annotations=(TEXTS, "its annotations"),
            httpPort=(_number(1, 65535), "its port for HTTP"),
            grpcPort=(_number(1, 65535), "its port for gRPC"),
        ),
        ingress=_section(
            enabled=(FLAG, "an Ingress for HTTP"),
            className=(NAME, "its IngressClass; empty = the default one"),
            host=(NAME, "its host; empty = every one"),
            annotations=(TEXTS, "its annotations, over those for nginx"),
            tls=(OBJECTS, "its tls"),
        ),
        gateway=_section(
            enabled=(FLAG, "an HTTPRoute of the Gateway API"),
            parentRefs=(OBJECTS, "the Gateways of the routes"),
            hostnames=(STRINGS, "host names of the routes"),
            grpc=(FLAG, "a GRPCRoute, too"),
        ),
        networkPolicy=_section(
            enabled=(FLAG, "restrict who reaches the pods"),
            clients=(OBJECTS, "peers that may send requests; empty = all"),
            monitoring=(OBJECTS, "peers that may read metrics; empty = none"),
            egress=(OBJECTS, "rules of egress, besides DNS and the pods of Ray; empty = all"),
        ),
        podSecurityContext=(MAP, "security context of all pods; both containers of the head need one user"),
        extra=_section(
            env=(OBJECTS, "environment variables of all containers"),
            volumes=(OBJECTS, "volumes of all pods"),
            volumeMounts=(OBJECTS, "mounts of all containers"),
            labels=(TEXTS, "labels of all pods"),
            annotations=(TEXTS, "annotations of all pods"),
        ),
        **{"global": (MAP, "set by a chart that contains this one; not used")},
    )
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$defs": definitions, **schema}


def _rows(schema: Schema, defaults: Any, path: str) -> list[str]:
    rows: list[str] = []
    for name, entry in schema["properties"].items():
        default, key = (defaults or {}).get(name), f"{path}{name}"
        if key == "spec" or "properties" not in entry or "requests" in entry["properties"]:
            shown = "" if key == "global" else f"`{json.dumps(default)}`"
            rows.append(f"| `{key}` | {'see values.yaml' if len(shown) > 90 else shown} | {entry['description']} |")
        else:
            rows += _rows(entry, default, f"{key}.")
    return rows


MARK = "<!-- values: made by helm/schema.py -->\n"


def readme() -> str:
    """The chart's README with a current table of values, which stands between two marks."""
    before, _, after = (CHART / "README.md").read_text(encoding="utf-8").split(MARK)
    defaults = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    table = "\n".join(["| value | default | what it is |", "| --- | --- | --- |", *_rows(values_schema(), defaults, "")])
    return f"{before}{MARK}{table}\n{MARK}{after}"


def schema_text() -> str:
    """The content of `values.schema.json`."""
    return json.dumps(values_schema(), indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    (CHART / "values.schema.json").write_text(schema_text(), encoding="utf-8")
    (CHART / "README.md").write_text(readme(), encoding="utf-8")

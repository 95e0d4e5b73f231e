"""Validation of rendered objects: Kubernetes' schemas, in which unknown keys are errors, and KubeRay's."""

import json
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator
from kubernetes_validate.utils import all_versions, major_minor, schema_contents
from referencing import Registry, Resource

from support.helm.chart import ROOT, Object

KUBERAY = ROOT.parent / "shared" / "kuberay" / "raycluster-v1.openapi.json"  # beside the checkout, if at all
FOREIGN = ("gateway.networking.k8s.io/v1", "monitoring.coreos.com/v1")  # no schemas of these are available here


def errors(document: Object, version: str) -> list[str]:
    """A sentence per error of an object of Kubernetes."""
    group = document["apiVersion"].split("/")
    api = "-".join((group[0].partition(".")[0], *group[1:]))
    return _sentences(_validator(f"{document['kind'].lower()}-{api}", version), document)


def cluster_errors(document: Object) -> list[str]:
    """The same of a RayCluster, without its pods."""
    return _sentences(_cluster_validator(), document)


def _sentences(validator: Any, document: Object) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in validator.iter_errors(document)]


@cache
def _validator(name: str, version: str) -> Any:
    registry, folder = _definitions(version)
    schema = schema_contents(f"{folder}/{name}.json", version)
    return Draft202012Validator(schema, registry=Resource.from_contents(schema) @ registry)


@cache
def _definitions(version: str) -> tuple[Any, str]:
    (full,) = {found for found in all_versions() if major_minor(found) == version}
    folder = f"kubernetes-json-schema/v{full}-local-strict"
    definitions = schema_contents(f"{folder}/_definitions.json", version)
    return Resource.from_contents(definitions) @ Registry[Any](), folder


@cache
def _cluster_validator() -> Any:
    return Draft202012Validator(_closed(json.loads(KUBERAY.read_text())))


def _closed(schema: Any) -> Any:
    """Unknown keys become errors, as Kubernetes would drop them without one."""
    if isinstance(schema, list):
        return [_closed(entry) for entry in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(entry) for key, entry in schema.items()}
    if schema.get("x-kubernetes-int-or-string"):
        closed.pop("type", None)
    is_open = "additionalProperties" in schema or schema.get("x-kubernetes-preserve-unknown-fields")
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object" and not is_open:
        closed["additionalProperties"] = False
    return closed

"""Rendered objects of the chart, each render once per process, and the pods in them."""

import json
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from support.helm.tools import helm_path

ROOT = Path(__file__).parents[3]
CHART = ROOT / "helm" / "headrace"
CI_FILES = tuple(sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml")))
LONG_NAME = "headrace-" + "a" * 31  # 40 characters, as many as a name may have

Object = dict[str, Any]


class RefusedError(Exception):
    """Helm's message."""


@dataclass(frozen=True)
class Pod:
    """A pod template, with the labels that KubeRay adds."""

    name: str  # head, worker-GROUP, router, test
    labels: dict[str, str]
    spec: Object

    @property
    def containers(self) -> list[Object]:
        """Those of the chart."""
        found: list[Object] = self.spec["containers"]
        return found


def run_helm(*arguments: str) -> str:
    """Standard output. Raises RefusedError."""
    result = subprocess.run([helm_path(), *arguments], capture_output=True, text=True, timeout=50, check=False)
    if result.returncode:
        raise RefusedError(result.stderr + result.stdout)
    return result.stdout


def values_file(name: str) -> str:
    """The path of one of the files in `ci/`."""
    return str(CHART / "ci" / f"{name}-values.yaml")


@cache
def render(values: str = "", release: str = "headrace", changed: str = "{}") -> tuple[Object, ...]:
    """The objects of a release with a file of `ci/`, and `changed`, JSON of values that differ from it."""
    files = ("-f", values_file(values)) if values else ()
    sets = [part for key, value in json.loads(changed).items() for part in ("--set-json", f"{key}={json.dumps(value)}")]
    text = run_helm("template", release, str(CHART), *files, *sets)
    return tuple(found for found in yaml.load_all(text, Loader=yaml.CSafeLoader) if found)


def changed(values: str = "", **changes: Any) -> tuple[Object, ...]:
    """The objects with changed values, whose paths have `__` in place of dots."""
    return render(values, changed=json.dumps({key.replace("__", "."): value for key, value in changes.items()}))


def of_kind(objects: tuple[Object, ...], kind: str) -> list[Object]:
    return [found for found in objects if found["kind"] == kind]


def named(objects: tuple[Object, ...], kind: str, suffix: str = "") -> Object:
    """The one object of a kind whose name ends so."""
    (found,) = [found for found in of_kind(objects, kind) if found["metadata"]["name"].endswith(suffix)]
    return found


def config(objects: tuple[Object, ...], key: str) -> Object:
    """A file in the ConfigMap."""
    document: Object = yaml.safe_load(named(objects, "ConfigMap")["data"][key])
    return document


def pods(objects: tuple[Object, ...]) -> list[Pod]:
    """All pods of a release."""
    cluster = named(objects, "RayCluster")
    ray = {"ray.io/cluster": cluster["metadata"]["name"]}
    head = cluster["spec"]["headGroupSpec"]["template"]
    found = [Pod("head", head["metadata"]["labels"] | ray | {"ray.io/node-type": "head"}, head["spec"])]
    for group in cluster["spec"]["workerGroupSpecs"]:
        labels = ray | {"ray.io/node-type": "worker", "ray.io/group": group["groupName"]}
        template = group["template"]
        pod = Pod(f"worker-{group['groupName']}", template["metadata"]["labels"] | labels, template["spec"])
        found.append(pod)
    router = named(objects, "Deployment")["spec"]["template"]
    found.append(Pod("router", router["metadata"]["labels"], router["spec"]))
    return found + [Pod("test", pod["metadata"]["labels"], pod["spec"]) for pod in of_kind(objects, "Pod")]


def is_ray(pod: Pod) -> bool:
    return "ray.io/cluster" in pod.labels

"""What a change of values changes: renders before and after it."""

import base64
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.helm.api_server import api_server
from support.helm.chart import CHART, Object, changed, named, render, run_helm


def _differences(**changes: Any) -> set[str]:
    """Kind and name of every object that differs, except the Secret, which is random without a cluster."""
    before, after = (
        {(found["kind"], found["metadata"]["name"]): found for found in objects}
        for objects in (render(), changed(**changes))
    )
    keys = before.keys() | after.keys()
    return {
        f"{kind} {name}"
        for kind, name in keys
        if kind != "Secret" and before.get((kind, name)) != after.get((kind, name))
    }


@pytest.mark.parametrize(
    "changes",
    [
        {"spec__health": {"start_seconds": 900}},
        {"spec__models": [{"source": "smollm2", "cpu_share": 4, "max_num_seqs": 8}]},
    ],
)
def test_models_and_health_change_no_pod(changes: dict[str, Any]) -> None:
    assert _differences(**changes) == {"ConfigMap headrace-config"}


@pytest.mark.parametrize(
    "changes",
    [
        {"spec__routers": {"policy": "round-robin"}},
        {"tls__existingSecret": "public-tls"},
        {"auth__enabled": False},
    ],
)
def test_settings_of_routers_replace_routers_alone(changes: dict[str, Any]) -> None:
    found = _differences(**changes)
    assert {"ConfigMap headrace-config", "Deployment headrace-router"} <= found
    assert not any(name.startswith("RayCluster") for name in found)


@pytest.mark.parametrize(
    ("changes", "is_old"),
    [
        ({"workers__serving": {"memory": "9Gi"}}, {"head": False, "serving": True}),
        ({"head__shm": "512Mi"}, {"head": True, "serving": False}),
        ({"extra__env": [{"name": "A", "value": "b"}]}, {"head": True, "serving": True}),
        ({"workers__serving": {"replicas": 2, "cpus": 4}}, {"head": False, "serving": False}),
        ({"router__replicas": 3}, {"head": False, "serving": False}),
    ],
)
def test_the_annotation_shows_which_pods_of_ray_are_old(changes: dict[str, Any], is_old: dict[str, bool]) -> None:
    before, after = _hashes(render()), _hashes(changed(**changes))
    assert {name: before[name] != after[name] for name in before} == is_old


def test_keys_are_random() -> None:
    first, second = (named(objects, "Secret")["data"] for objects in (render(), render("minimal")))
    assert first.keys() == second.keys() == {"cluster-secret", "admin-key", "metrics-key", "api-keys"}
    assert not set(first.values()) & set(second.values())
    assert named(render(), "Secret")["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert not [found for found in render("external-keys") if found["kind"] == "Secret"]


def test_keys_of_an_installed_release_are_kept(tmp_path: Path) -> None:
    """With a chart of the Secret alone: helm asks for each kind that it renders."""
    data = {"cluster-secret": "b2xk", "api-keys": "a2V5cw=="}
    chart = tmp_path / "chart"
    shutil.copytree(CHART, chart)
    for path in (chart / "templates").rglob("*.yaml"):
        if path.name != "secret.yaml":
            path.unlink()
    (chart / "templates" / "NOTES.txt").unlink()
    owner = {"meta.helm.sh/release-name": "headrace", "meta.helm.sh/release-namespace": "default"}  # as helm adds it
    made = named(render(), "Secret")
    secret = made | {"data": data, "metadata": made["metadata"] | {"annotations": owner}}
    with api_server(secret, tmp_path) as config:
        text = run_helm(
            *("template", "headrace", str(chart), "--dry-run=server", "--disable-openapi-validation"),
            *("--kubeconfig", str(config)),
        )
    found = yaml.safe_load(text)["data"]
    assert found.items() > data.items()
    assert len(base64.b64decode(found["metrics-key"])) == 40  # a key that the release had not is made


def _hashes(objects: tuple[Object, ...]) -> dict[str, str]:
    spec = named(objects, "RayCluster")["spec"]
    templates = {"head": spec["headGroupSpec"]["template"]}
    templates |= {group["groupName"]: group["template"] for group in spec["workerGroupSpecs"]}
    return {name: template["metadata"]["annotations"]["headrace.dev/template"] for name, template in templates.items()}

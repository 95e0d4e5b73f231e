"""What the chart renders is valid for Kubernetes, KubeRay and the command line."""

import re
import shlex
from pathlib import Path

import pytest

from headrace_cluster.spec.settings import build_spec
from support.helm.chart import (
    CHART,
    CI_FILES,
    LONG_NAME,
    ROOT,
    changed,
    config,
    named,
    pods,
    render,
    run_helm,
    values_file,
)
from support.helm.schemas import FOREIGN, KUBERAY, cluster_errors, errors

VERSIONS = ("1.30", "1.33", "1.37")


@pytest.mark.parametrize("values", CI_FILES)
def test_lint_finds_nothing(values: str) -> None:
    run_helm("lint", "--strict", str(CHART), "-f", values_file(values))


def test_the_page_of_deployment_installs_each_values_file() -> None:
    page = (ROOT / "docs" / "deployment.md").read_text()
    commands = re.findall(r"^helm install (.+)$", page, re.MULTILINE)
    assert len(commands) == 1 + len(CI_FILES)
    for values in CI_FILES:
        (section,) = re.findall(rf"^#### {values}: (.*?)(?=^#)", page, re.MULTILINE | re.DOTALL)
        assert f" -f helm/headrace/ci/{values}-values.yaml\n" in section
    for command in commands:
        arguments = shlex.split(command.replace("$REGISTRY", "registry.example.com"))
        run_helm("template", *(str(ROOT / word) if word.startswith("helm/") else word for word in arguments))


@pytest.mark.parametrize("values", CI_FILES)
def test_objects_match_their_schemas(values: str) -> None:
    objects = render(values, LONG_NAME)
    known = [found for found in objects if found["kind"] != "RayCluster" and found["apiVersion"] not in FOREIGN]
    ray = [
        {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": pod.name}, "spec": pod.spec} for pod in pods(objects)
    ]
    found = [
        f"{version} {document['kind']} {document['metadata']['name']}: {error}"
        for version in VERSIONS
        for document in (*known, *ray)
        for error in errors(document, version)
    ]
    assert not found


@pytest.mark.skipif(not KUBERAY.exists(), reason="the schema of RayCluster is not on this machine")
@pytest.mark.parametrize("values", CI_FILES)
def test_ray_clusters_match_their_schema(values: str) -> None:
    assert not cluster_errors(named(render(values), "RayCluster"))


@pytest.mark.parametrize("values", CI_FILES)
def test_the_config_map_holds_specs(values: str, tmp_path: Path) -> None:
    for key, text in named(render(values), "ConfigMap")["data"].items():
        file = tmp_path / key
        file.write_text(text)
        spec = build_spec({}, file, environ={})
        if key == "cluster.yaml":
            admin = 8002 if values == "tls" else 0
            assert (spec.control.port, spec.admin.port, spec.ray.address) == (8004, admin, "127.0.0.1:6379")
            assert spec.tls.enabled == bool(admin)
            assert spec.health.drain_seconds == 600
        else:
            assert (spec.routers.port, spec.routers.grpc_port, spec.metrics_ports) == (8000, 8001, (8003,))
            assert spec.metrics_host == "0.0.0.0"
            assert spec.auth.has_keys != spec.auth.allow_no_auth
            assert spec.routers.shutdown_seconds == spec.limits.request_seconds == 600
            assert spec.tls.enabled == (values == "tls")


def test_values_of_zero_and_false_are_kept() -> None:
    objects = changed(
        spec__health={"drain_seconds": 0},
        spec__routers={"rebalancing": False, "migration_limit": 0},
        workers__serving={"replicas": 0, "readOnlyRootFilesystem": False},
        workers__other={},
        spec__models=[{}],
    )
    assert config(objects, "cluster.yaml")["health"] == {"drain_seconds": 0}
    routers = config(objects, "router.yaml")["routers"]
    assert (routers["rebalancing"], routers["migration_limit"]) == (False, 0)
    serving = named(objects, "RayCluster")["spec"]["workerGroupSpecs"][1]
    assert (serving["groupName"], serving["replicas"]) == ("serving", 0)
    security = serving["template"]["spec"]["containers"][0]["securityContext"]
    assert security["readOnlyRootFilesystem"] is False


def test_routes_lead_to_the_ports_of_the_service() -> None:
    objects = render("gateway")
    service = named(objects, "Service", "headrace")
    ports = {port["name"]: port["port"] for port in service["spec"]["ports"]}
    for kind, port in (("HTTPRoute", "http"), ("GRPCRoute", "grpc")):
        (rule,) = named(objects, kind)["spec"]["rules"]
        assert rule["backendRefs"] == [{"name": "headrace", "port": ports[port]}]
        host = "llm.example.com" if kind == "HTTPRoute" else "grpc.llm.example.com"
        assert named(objects, kind)["spec"]["hostnames"] == [host]
    assert named(objects, "HTTPRoute")["spec"]["rules"][0]["timeouts"] == {"request": "0s"}
    backend = named(objects, "Ingress")["spec"]["rules"][0]["http"]["paths"][0]["backend"]
    assert backend == {"service": {"name": "headrace", "port": {"name": "http"}}}


def test_a_pod_monitor_reads_the_routers_with_their_key() -> None:
    objects = render("gateway")
    monitor, router = named(objects, "PodMonitor", "-router"), named(objects, "Deployment")["spec"]["template"]
    assert monitor["spec"]["selector"]["matchLabels"].items() <= router["metadata"]["labels"].items()
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in [port["name"] for port in router["spec"]["containers"][0]["ports"]]
    credentials = endpoint["authorization"]["credentials"]
    secret = named(objects, "Secret")
    assert credentials["name"] == secret["metadata"]["name"] and credentials["key"] in secret["data"]
    assert monitor["metadata"]["labels"]["release"] == "prometheus"


def test_pods_get_an_identity_containers_and_variables_of_their_own() -> None:
    fetch = {
        "name": "fetch",
        "image": "registry.example.com/fetch:1",
        "volumeMounts": [{"name": "models-local", "mountPath": "/models-local"}],
    }
    objects = changed(
        workerDefaults__serviceAccountName="models",
        workerDefaults__initContainers=[fetch],
        workerDefaults__env=[{"name": "RAY_memory_monitor_refresh_ms", "value": "250"}],
        workerDefaults__envFrom=[{"secretRef": {"name": "buckets"}}],
        router__envFrom=[{"configMapRef": {"name": "tracing"}}],
        extra__volumes=[{"name": "models-local", "emptyDir": {}}],
        extra__volumeMounts=[{"name": "models-local", "mountPath": "/models-local"}],
    )
    found = {pod.name: pod for pod in pods(objects)}
    worker, head, router = found["worker-serving"], found["head"], found["router"]
    assert worker.spec["serviceAccountName"] == "models"
    assert not {"serviceAccountName", "initContainers"} & {*head.spec, *router.spec}
    assert [container["name"] for container in worker.spec["initContainers"]] == ["fetch"]
    (ray,) = worker.containers
    assert ray["envFrom"] == [{"secretRef": {"name": "buckets"}}]
    values = [entry["value"] for entry in ray["env"] if entry["name"] == "RAY_memory_monitor_refresh_ms"]
    assert values == ["0", "250"], "the last one counts"
    assert router.containers[0]["envFrom"] == [{"configMapRef": {"name": "tracing"}}]
    assert not any("envFrom" in container for container in head.containers)


def test_variables_for_all_containers_come_before_those_of_a_pod() -> None:
    objects = changed(
        extra__env=[{"name": "A", "value": "all"}],
        extra__envFrom=[{"secretRef": {"name": "all"}}],
        head__env=[{"name": "A", "value": "head"}],
        head__serviceAccountName="controller",
    )
    head = next(pod for pod in pods(objects) if pod.name == "head")
    for container in head.containers:
        assert [entry["value"] for entry in container["env"] if entry["name"] == "A"] == ["all", "head"]
        assert container["envFrom"] == [{"secretRef": {"name": "all"}}]
    assert (head.spec["serviceAccountName"], head.spec["automountServiceAccountToken"]) == ("controller", True)

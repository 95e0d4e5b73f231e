"""Rules that every pod and object of the chart keeps, whatever the values."""

import importlib.util
import re
from typing import Any

import pytest

from support.helm.chart import CI_FILES, LONG_NAME, Object, Pod, config, is_ray, named, of_kind, pods, render

VALUES = pytest.mark.parametrize("values", CI_FILES)
SECRETS = {  # keys of the Secret by container; HELM's test pod sends a request with the first API key
    "router": {"cluster-secret", "metrics-key", "api-keys"},
    "controller": {"cluster-secret", "metrics-key"},
    "chat": {"api-keys"},
    "ray-head": set(),
    "ray-worker": set(),
}
# KubeRay's validation: it sets these variables and parameters itself, or refuses them.
OWNED_VARIABLES = {"RAY_ADDRESS", "RAY_IP", "FQ_RAY_IP", "RAY_PORT", "RAY_CLUSTER_NAME", "REDIS_PASSWORD"}
OWNED_PARAMETERS = {"labels", "resources", "head", "address", "block", "redis-password"}


def _variables(container: Object) -> dict[str, Any]:
    return {entry["name"]: entry.get("value") for entry in container["env"]}


def _mounts(container: Object) -> dict[str, Object]:
    return {mount["mountPath"]: mount for mount in container["volumeMounts"]}


def _volumes(pod: Pod) -> dict[str, Object]:
    return {volume["name"]: volume for volume in pod.spec["volumes"]}


@VALUES
def test_pods_are_restricted(values: str) -> None:
    """What the Pod Security Standard `restricted` requires, and more."""
    for pod in pods(render(values)):
        assert pod.spec["enableServiceLinks"] is False
        assert pod.spec["automountServiceAccountToken"] is ("serviceAccountName" in pod.spec)
        context = pod.spec["securityContext"]
        assert context["runAsNonRoot"] is True and context["runAsUser"] == 10001
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        for key in ("hostNetwork", "hostPID", "hostIPC"):
            assert not pod.spec.get(key)
        for container in pod.containers:
            security = container["securityContext"]
            assert security["allowPrivilegeEscalation"] is False and security["readOnlyRootFilesystem"] is True
            assert security["capabilities"]["drop"] == ["ALL"]
            assert "runAsUser" not in security and not security.get("privileged")
            added = security["capabilities"].get("add", [])
            assert added == (["IPC_LOCK"] if values == "tp8" and pod.name == "worker-serving" else [])


@VALUES
def test_files_are_writable_where_they_must_be(values: str) -> None:
    for pod in pods(render(values)):
        volumes = _volumes(pod)
        assert not any("hostPath" in volume for volume in volumes.values())
        for container in pod.containers:
            mounts = _mounts(container)
            assert len(mounts) == len(container["volumeMounts"])
            assert not any("subPath" in mount or "subPathExpr" in mount for mount in mounts.values())
            assert {mount["name"] for mount in mounts.values()} <= volumes.keys()
            for path in ("/tmp", "/var/lib/headrace"):
                assert "emptyDir" in volumes[mounts[path]["name"]]
            home = _variables(container)["HEADRACE_HOME"]
            assert home.startswith("/var/lib/headrace/") and home not in mounts  # a mount is writable by all
            for path, mount in mounts.items():
                assert path.startswith("/etc/") == (mount.get("readOnly", False) and path != "/models")
            if is_ray(pod):
                assert volumes[mounts["/dev/shm"]["name"]]["emptyDir"]["medium"] == "Memory"


@VALUES
def test_long_running_containers_have_probes(values: str) -> None:
    for pod in pods(render(values)):
        for container in pod.containers:
            probes: Object = {kind: container.get(f"{kind}Probe") for kind in ("startup", "readiness", "liveness")}
            ports = {port["name"] for port in container.get("ports", ())}
            if container["name"] == "controller":
                get = probes["readiness"]["httpGet"]
                assert (get["path"], get["port"] in ports) == ("/health", True)
                assert get["scheme"] == ("HTTPS" if values == "tls" else "HTTP")
                assert probes["liveness"] is None  # a controller that waits for Ray is not to be killed
            elif pod.name != "test":
                if pod.name.startswith("worker"):
                    command = probes.pop("readiness")["exec"]["command"]
                    assert importlib.util.find_spec(command[-1]) is not None
                requests = {kind: probe["httpGet"] for kind, probe in probes.items()}
                assert {request["port"] for request in requests.values()} <= ports
                expected = ("/health/live", "/health/accepting") if pod.name == "router" else ("/api/healthz",) * 2
                paths = {kind: request["path"] for kind, request in requests.items()}
                found = {"startup": expected[0], "readiness": expected[1], "liveness": expected[0]}
                assert paths == {kind: path for kind, path in found.items() if kind in probes}
                scheme = "HTTPS" if values == "tls" and pod.name == "router" else "HTTP"
                assert {request.get("scheme", "HTTP") for request in requests.values()} == {scheme}


@VALUES
def test_each_container_gets_its_secrets_alone(values: str) -> None:
    for pod in pods(render(values)):
        volumes = _volumes(pod)
        for container in pod.containers:
            held: set[str] = set()
            for mount in container["volumeMounts"]:
                secret = volumes[mount["name"]].get("secret")
                if secret is not None and mount["mountPath"] == "/etc/headrace/keys":
                    assert secret["secretName"] == ("my-keys" if values == "external-keys" else "headrace-keys")
                    held = {item["key"] for item in secret["items"]}
                    assert secret["defaultMode"] == 0o440 and mount["readOnly"] is True
            expected = SECRETS[container["name"]] - ({"api-keys"} if values == "no-auth" else set())
            if values == "tls" and container["name"] == "controller":
                expected = expected | {"admin-key"}
            assert held == expected
            from_secrets = [entry["name"] for entry in container["env"] if "valueFrom" in entry]
            assert from_secrets == (["RAY_AUTH_TOKEN"] if container["name"] == "controller" else [])


@VALUES
def test_files_of_the_specs_are_mounted(values: str) -> None:
    """Every path that the command lines and the specs name is a file of a volume."""
    objects = render(values)
    for pod, key in ((pods(objects)[0], "cluster.yaml"), (_router(objects), "router.yaml")):
        container = next(found for found in pod.containers if found["name"] in ("controller", "router"))
        text = f"{container['command']} {config(objects, key)}"
        volumes = _volumes(pod)
        files = {
            f"{mount['mountPath']}/{item['path']}"
            for mount in container["volumeMounts"]
            for source in volumes[mount["name"]].values()
            if isinstance(source, dict)
            for item in source.get("items", ())
        }
        named_files = set(re.findall(r"/etc/headrace/[\w./-]+", text))
        assert named_files and named_files <= files


@VALUES
def test_the_controller_can_find_its_node_of_ray(values: str) -> None:
    head = pods(render(values))[0]
    assert head.spec["shareProcessNamespace"] is True
    ray, controller = head.containers
    assert (ray["name"], controller["name"]) == ("ray-head", "controller")  # KubeRay starts Ray in the first one
    assert ray["image"] == controller["image"]
    for path in ("/tmp", "/var/lib/headrace", "/dev/shm"):
        assert _mounts(ray)[path] == _mounts(controller)[path]
    token = next(entry for entry in controller["env"] if entry["name"] == "RAY_AUTH_TOKEN")
    assert token["valueFrom"]["secretKeyRef"] == {"name": "headrace", "key": "auth_token"}
    assert _variables(controller)["RAY_AUTH_MODE"] == "token"


@VALUES
def test_the_state_of_ray_is_stored_unless_it_is_off(values: str) -> None:
    objects = render(values)
    ray = pods(objects)[0].containers[0]
    if values == "external-keys":
        assert "RAY_gcs_storage" not in _variables(ray) and not of_kind(objects, "PersistentVolumeClaim")
    else:
        path = _variables(ray)["RAY_gcs_storage_path"]
        (mounted,) = [mount for folder, mount in _mounts(ray).items() if path.startswith(f"{folder}/")]
        claim = _volumes(pods(objects)[0])[mounted["name"]]["persistentVolumeClaim"]["claimName"]
        assert named(objects, "PersistentVolumeClaim", "-gcs")["metadata"]["name"] == claim


@VALUES
def test_a_router_outlives_its_longest_stream(values: str) -> None:
    objects = render(values)
    spec = _router(objects).spec
    router = config(objects, "router.yaml")
    longest = router["limits"]["request_seconds"]
    assert router["routers"]["shutdown_seconds"] >= longest
    assert router["routers"]["leave_seconds"] == 15 and "lifecycle" not in spec["containers"][0]
    assert spec["terminationGracePeriodSeconds"] > 15 + router["routers"]["shutdown_seconds"]
    assert config(objects, "cluster.yaml")["health"]["drain_seconds"] >= longest


@VALUES
def test_disruption_budgets_are_numbers_that_allow_a_disruption(values: str) -> None:
    objects = render(values)
    counts = {pod.name: 1 for pod in pods(objects)}
    for group in named(objects, "RayCluster")["spec"]["workerGroupSpecs"]:
        counts[f"worker-{group['groupName']}"] = group["replicas"]
    scaler = next(iter(of_kind(objects, "HorizontalPodAutoscaler")), None)
    deployment = named(objects, "Deployment")["spec"]
    counts["router"] = scaler["spec"]["minReplicas"] if scaler else deployment["replicas"]
    assert ("replicas" in deployment) != bool(scaler)
    covered = set()
    for budget in of_kind(objects, "PodDisruptionBudget"):
        (pod,) = _selected(objects, budget["spec"]["selector"]["matchLabels"])
        covered.add(pod.name)
        least = budget["spec"]["minAvailable"]
        assert type(least) is int and (least < counts[pod.name] or pod.name == "head")
    assert {name for name, count in counts.items() if count > 1} <= covered


@VALUES
def test_selectors_match_their_pods(values: str) -> None:
    objects = render(values, LONG_NAME)
    expected = {"": "router", "-headless": "router", "-control": "head"}
    expected |= {"-admin": "head"} if values == "tls" else {}
    control = named(objects, "Service", "-control")
    address = f"{control['metadata']['name']}:{control['spec']['ports'][0]['port']}"
    assert address in _router(objects).spec["containers"][0]["command"]
    for suffix, name in expected.items():
        service = named(objects, "Service", f"{LONG_NAME}{suffix}")
        (pod,) = _selected(objects, service["spec"]["selector"])
        assert pod.name == name
        targets = {port["targetPort"] for port in service["spec"]["ports"]}
        ports = [port for container in pod.containers for port in container["ports"]]
        assert targets <= {port["name"] for port in ports} | {port["containerPort"] for port in ports}
    labels = named(objects, "Deployment")["spec"]["selector"]["matchLabels"]
    assert [pod.name for pod in _selected(objects, labels)] == ["router"]
    assert not any("version" in key for key in labels)
    for pod in pods(objects):
        if is_ray(pod):  # KubeRay sets these two itself, and selects the head by them
            assert not {"app.kubernetes.io/name", "app.kubernetes.io/created-by"} & pod.labels.keys()


@VALUES
def test_networks_are_open_where_they_must_be(values: str) -> None:
    """By pod: which ports are open to whom; a number from, up to."""
    objects = render(values)
    opened: dict[str, dict[str, set[tuple[int, int]]]] = {}
    for policy in of_kind(objects, "NetworkPolicy"):
        for pod in _selected(objects, policy["spec"]["podSelector"]["matchLabels"]):
            peers = opened.setdefault(pod.name, {})
            for rule in policy["spec"]["ingress"]:
                ports = {(port["port"], port.get("endPort", port["port"])) for port in rule.get("ports", ())}
                for peer in _peers(objects, rule):
                    peers.setdefault(peer, set()).update(ports or {(1, 65535)})
    clients, metrics = "team", "kubernetes.io/metadata.name"
    ray = {pod.name for pod in pods(objects) if is_ray(pod)}
    expected = {name: {pod: {(1, 65535)} for pod in ray} | {"router": {(8004, 8004), (32768, 60999)}} for name in ray}
    restricted = values == "external-keys"
    expected["router"] = {clients if restricted else "all": {(8000, 8000), (8001, 8001)}}
    if restricted:
        expected["router"]["test"] = expected["router"][clients]
    if restricted or values == "gateway":
        expected["router"][metrics] = {(8003, 8003)}
        for name in ray:
            expected[name][metrics] = {(8005, 8005), (8080, 8080)}
    if values == "tls":
        for name in ray:
            expected[name]["all"] = {(8002, 8002)}
    assert opened == expected


@VALUES
def test_ray_clusters_keep_the_rules_of_kuberay(values: str) -> None:
    cluster = named(render(values, LONG_NAME), "RayCluster")
    spec = cluster["spec"]
    name = cluster["metadata"]["name"]
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name) and len(name) <= 40
    assert spec["rayVersion"] == "2.60.0" and spec["authOptions"] == {"mode": "token"}
    assert spec["upgradeStrategy"] == {"type": "None"}  # with Recreate an upgrade deletes all pods at once
    gated = {"networkPolicy", "tlsOptions", "gcsFaultToleranceOptions", "enableInTreeAutoscaling", "autoscalerOptions"}
    assert not gated & spec.keys()
    groups = [group["groupName"] for group in spec["workerGroupSpecs"]]
    assert groups and len(set(groups)) == len(groups)
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        parameters = group["rayStartParams"]
        assert not OWNED_PARAMETERS & parameters.keys()
        assert all(isinstance(value, str) for value in parameters.values())
        assert group["template"]["spec"].get("restartPolicy", "Always") == "Always"
        assert re.fullmatch(r"[0-9a-f]{16}", group["template"]["metadata"]["annotations"]["headrace.dev/template"])
        assert not OWNED_VARIABLES & _variables(group["template"]["spec"]["containers"][0]).keys()
        fixed = [int(parameters[key]) for key in parameters if key.endswith("-port") and "worker" not in key]
        first, last = int(parameters["min-worker-port"]), int(parameters["max-worker-port"])
        assert len(set(fixed)) == len(fixed) and not any(first <= port <= last for port in fixed)
    for group in spec["workerGroupSpecs"]:
        assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
        assert group["labels"] == {"headrace.dev/group": group["groupName"]}
        container = group["template"]["spec"]["containers"][0]
        gpus = container["resources"]["limits"].get("nvidia.com/gpu", "0")
        assert group["rayStartParams"]["num-gpus"] == gpus
        assert group["rayStartParams"]["num-cpus"] == container["resources"]["requests"]["cpu"]
        assert ("headrace-worker-cuda" in container["image"]) == (gpus != "0")
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def _router(objects: tuple[Object, ...]) -> Pod:
    return next(pod for pod in pods(objects) if pod.name == "router")


def _selected(objects: tuple[Object, ...], labels: dict[str, str]) -> list[Pod]:
    assert labels
    return [pod for pod in pods(objects) if labels.items() <= pod.labels.items()]


def _peers(objects: tuple[Object, ...], rule: Object) -> set[str]:
    """Names of our pods, and for other peers the label that selects their namespace."""
    found: set[str] = set()
    for peer in rule.get("from", ()):
        if "namespaceSelector" in peer:
            found |= set(peer["namespaceSelector"]["matchLabels"])
        else:
            found |= {pod.name for pod in _selected(objects, peer["podSelector"]["matchLabels"])}
    return found if "from" in rule else {"all"}

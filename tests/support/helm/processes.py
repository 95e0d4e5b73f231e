"""Pods of a rendered release as processes of this machine: what KubeRay and a kubelet make of the objects.

Mount paths become folders, also inside arguments, variables and files; Services become addresses of this machine, whose
/tmp and /dev/shm are used as they are. Ray's processes of two pods share its ports, so those of a worker are shifted.
"""

import base64
import contextlib
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from ray.util import get_node_ip_address

from support.helm.chart import Object, Pod, named, pods

WORKER_SHIFT = 100  # of the ports of a worker's Ray
FIRST_WORKER_PORT = 15_000  # of the ranks there; the head's own begin at the chart's min-worker-port
SHARED = ("/tmp", "/dev/shm")
PORTS = (
    "node-manager-port",
    "object-manager-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
    "metrics-export-port",
)


@dataclass
class Release:
    """The processes of one release; a folder for its volumes and logs."""

    objects: tuple[Object, ...]
    folder: Path
    _running: dict[str, "subprocess.Popen[bytes]"] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.cluster = named(self.objects, "RayCluster")
        self.name = self.cluster["metadata"]["name"]
        self._data = {
            found["metadata"]["name"]: _data(found)
            for found in self.objects
            if found["kind"] in ("ConfigMap", "Secret")
        }
        self.address = str(get_node_ip_address())
        # KubeRay makes Ray's token.
        self._data[self.name] = {"auth_token": "0123456789abcdef" * 4}

    def secret(self, suffix: str, key: str) -> str:
        return self._data[f"{self.name}-{suffix}"][key]

    def pod(self, name: str) -> Pod:
        (found,) = [pod for pod in pods(self.objects) if pod.name == name]
        return found

    def start(self, pod: str, container: str) -> None:
        """Starts it, again if it has ended."""
        command, variables = self._command(pod, container), self.environment(pod, container)
        with (self.folder / f"{pod}-{container}.log").open("ab") as log:
            self._running[f"{pod}-{container}"] = subprocess.Popen(
                command,
                env=variables,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def run(self, pod: str, container: str, command: list[str] | None = None) -> "subprocess.CompletedProcess[str]":
        """The container's command, or another one in it such as a probe's, to its end."""
        variables = self.environment(pod, container)
        arguments = command or self._command(pod, container)
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60, "check": False}
        return subprocess.run(arguments, env=variables, cwd="/", **options)

    def running(self, pod: str, container: str) -> bool:
        return self._running[f"{pod}-{container}"].poll() is None

    def log(self, pod: str, container: str) -> str:
        return (self.folder / f"{pod}-{container}.log").read_text(errors="replace")

    def environment(self, pod: str, container: str) -> dict[str, str]:
        """Nothing of this process's own but the folder of its programs, which the images have on PATH."""
        found = self._container(pod, container)
        variables = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"}
        for entry in found.get("env", ()):
            variables[entry["name"]] = str(entry["value"]) if "value" in entry else self._referred(entry["valueFrom"])
        if pod.startswith(("head", "worker")) and container.startswith("ray-"):
            variables |= {  # of KubeRay
                "RAY_ADDRESS": "127.0.0.1:6379",
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": self._data[self.name]["auth_token"],
                "RAY_CLUSTER_NAME": self.name,
                "RAY_PORT": "6379",
            }
        return {name: self._localized(value, pod, found) for name, value in variables.items()}

    def close(self) -> None:
        """Kills what runs; a worker's Ray would drain for minutes."""
        found = [psutil.Process(process.pid) for process in self._running.values() if process.poll() is None]
        for process in [child for parent in found for child in (*parent.children(recursive=True), parent)]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for ended in self._running.values():
            ended.wait()
        self._running.clear()

    def _container(self, pod: str, name: str) -> Object:
        (found,) = [container for container in self.pod(pod).containers if container["name"] == name]
        return found

    def _command(self, pod: str, name: str) -> list[str]:
        found = self._container(pod, name)
        if pod == "head" and name == "ray-head":
            command = ["ray", "start", "--head", "--block", *_flags(self.cluster["spec"]["headGroupSpec"], shift=False)]
        elif name == "ray-worker":
            groups = {group["groupName"]: group for group in self.cluster["spec"]["workerGroupSpecs"]}
            group = groups[pod.removeprefix("worker-")]
            labels = ",".join(f"{key}={value}" for key, value in group.get("labels", {}).items())
            command = ["ray", "start", "--address=127.0.0.1:6379", "--block", "--node-ip-address=127.0.0.2"]
            command += [f"--labels={labels}", *_flags(group, shift=True)]
        else:
            command = list(found["command"])
        return [self._localized(argument, pod, found) for argument in command]

    def _localized(self, text: str, pod: str, container: Object) -> str:
        """A text with the addresses and folders of this machine."""
        text = text.replace(f"{self.name}-control:8004", f"{self.address}:8004")
        text = text.replace(f"http://{self.name} --port 80", "http://127.0.0.1 --port 8000")
        for mount in container.get("volumeMounts", ()):
            if mount["mountPath"] not in SHARED:
                text = text.replace(mount["mountPath"], str(self._volume(pod, mount["name"], container)))
        return text

    def _volume(self, pod: str, name: str, container: Object) -> Path:
        """The folder of a volume; files of a ConfigMap or Secret are links into `..data`, as a kubelet makes them."""
        (volume,) = [found for found in self.pod(pod).spec["volumes"] if found["name"] == name]
        claim = volume.get("persistentVolumeClaim")
        folder = self.folder / (f"claim-{claim['claimName']}" if claim else f"{pod}-{name}")
        if folder.exists():
            return folder
        folder.mkdir()
        source = volume.get("configMap") or volume.get("secret")
        if source:
            content = folder / "..2026_01_01"
            content.mkdir()
            data = self._data[source.get("name") or source["secretName"]]
            for item in source["items"]:
                (content / item["path"]).write_text(self._localized(data[item["key"]], pod, container))
                # A kubelet's files belong to root and the pod's group; these belong to the user of the processes.
                (content / item["path"]).chmod(source.get("defaultMode", 0o644) & 0o700)
                (folder / item["path"]).symlink_to(Path("..data", item["path"]))
            (folder / "..data").symlink_to(content.name)
        return folder

    def _referred(self, source: Object) -> str:
        reference = source["secretKeyRef"]
        return self._data[reference["name"]][reference["key"]]


def _data(found: Object) -> dict[str, str]:
    """Of a ConfigMap or Secret, as text."""
    data = found.get("data") or {}
    if found["kind"] == "Secret":
        data = {key: base64.b64decode(value).decode() for key, value in data.items()}
    return {**data, **(found.get("stringData") or {})}


def _flags(group: Object, *, shift: bool) -> list[str]:
    """`rayStartParams` as KubeRay writes them, and the memory of the container's limit."""
    parameters: dict[str, str] = dict(group["rayStartParams"])
    if shift:
        parameters |= {key: str(int(parameters[key]) + WORKER_SHIFT) for key in PORTS}
        parameters["min-worker-port"] = str(FIRST_WORKER_PORT)
    else:
        parameters["max-worker-port"] = str(FIRST_WORKER_PORT - 1)
    limit = group["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"]
    memory = int(limit.removesuffix("Gi")) << 30
    return [f"--memory={memory}", *(f"--{key}={value}" for key, value in parameters.items())]

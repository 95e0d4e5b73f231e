"""Pods of a rendered release as processes of this machine: what KubeRay and a kubelet make of the objects.

Mount paths become folders, also inside arguments, variables and files. Each process has a mount namespace with a
read-only root, the pod's /tmp and an /etc/hosts with the names of the Services; /dev/shm is the machine's. Pods share
the machine's ports: those of a worker's Ray are shifted, and each router has an address of its own.
"""

import base64
import contextlib
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from ray.util import get_node_ip_address

from support.helm.chart import Object, Pod, named, pods

WORKER_SHIFT = 100  # of the ports of a worker's Ray, for each worker
FIRST_WORKER_PORT, WORKER_PORTS = 15_000, 200  # of the ranks there; the head's own begin at the chart's min-worker-port
LOG_SHOWN = 1500  # characters of the log of a container that ended
RESTART_SECONDS = 2.0
SHARED = ("/tmp", "/dev/shm")  # not renamed in arguments, variables and files
PORTS = (
    "node-manager-port",
    "object-manager-port",
    "dashboard-agent-listen-port",
    "dashboard-agent-grpc-port",
    "runtime-env-agent-port",
    "metrics-export-port",
)
# Of a Service named headrace, and of Kubernetes itself.
INJECTED = {
    "HEADRACE_PORT": "tcp://10.0.0.1:80",
    "HEADRACE_SERVICE_HOST": "10.0.0.1",
    "HEADRACE_SERVICE_PORT": "80",
    "KUBERNETES_SERVICE_HOST": "10.0.0.2",
    "KUBERNETES_PORT": "tcp://10.0.0.2:443",
}
NAMESPACE = """
mount --make-rprivate / && mount --bind "$1" /etc/hosts && mount --bind "$2" "$2" && mount --bind "$3" /tmp &&
mount -o remount,bind,ro / && shift 3 && exec "$@"
"""


def has_namespaces() -> bool:
    """Whether this machine lets a process make a mount namespace."""
    return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


@dataclass
class Release:
    """The processes of one release; a folder for its volumes and logs. Pods of a kind are numbered."""

    objects: tuple[Object, ...]
    folder: Path
    _running: dict[tuple[str, int, str], "subprocess.Popen[bytes]"] = field(default_factory=dict)
    _mounted: dict[Path, tuple[str, int, Object, Object]] = field(default_factory=dict)  # pod, container, volume
    _versions: int = 0  # of files in volumes
    _image: dict[str, str] = field(default_factory=dict)  # variables of the containers that start from now on

    _closed: threading.Event = field(default_factory=threading.Event)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    def __post_init__(self) -> None:
        hidden = [path for path in (sys.executable, __file__) if Path(path).is_relative_to("/tmp")]
        assert not hidden, f"Each pod has a /tmp of its own, without {hidden[0]}: use a checkout elsewhere."
        self.name = named(self.objects, "RayCluster")["metadata"]["name"]
        self._token = "0123456789abcdef" * 4  # KubeRay makes it
        self._keys: dict[str, str] = {}  # of the Secret, which helm keeps
        self.apply(self.objects)
        self.move_head(str(get_node_ip_address()))
        threading.Thread(target=self._restart, daemon=True).start()

    def apply(self, objects: tuple[Object, ...]) -> None:
        """`helm upgrade`: what is mounted changes as by a kubelet; pods stay as they are until they start again."""
        self.objects = objects
        self.cluster = named(objects, "RayCluster")
        self._data = {
            found["metadata"]["name"]: _data(found) for found in objects if found["kind"] in ("ConfigMap", "Secret")
        }
        self._keys = self._data[f"{self.name}-keys"] | self._keys
        self._data |= {self.name: {"auth_token": self._token}, f"{self.name}-keys": self._keys}
        self._update_volumes()

    def secret(self, key: str) -> str:
        return self._keys[key]

    def replace_secret(self, key: str, value: str) -> None:
        """As by kubectl."""
        self._keys[key] = value
        self._update_volumes()

    def move_head(self, address: str) -> None:
        """The next head pod has this address; names of Services lead there."""
        self.address = address
        names = (f"{self.name}-control", f"{self.name}-admin", f"{self.name}-head-svc")
        text = "127.0.0.1 localhost\n" + "".join(f"{address} {name}\n" for name in names) + f"127.0.0.1 {self.name}\n"
        (self.folder / "hosts").write_text(text)  # in place: it is mounted

    def use_image(self, version: str) -> None:
        """Containers that start from now on have the package in this version, by its name alone."""
        folder = self.folder / f"image-{version}"
        (folder / f"headrace-{version}.dist-info").mkdir(parents=True)
        metadata = f"Metadata-Version: 2.1\nName: headrace\nVersion: {version}\n"
        (folder / f"headrace-{version}.dist-info" / "METADATA").write_text(metadata)
        self._image = {"PYTHONPATH": str(folder)}

    def pod(self, name: str) -> Pod:
        (found,) = [pod for pod in pods(self.objects) if pod.name == name]
        return found

    # -- containers -------------------------------------------------------------------------------------------

    def start(self, pod: str, container: str, number: int = 0) -> None:
        """Starts it. If it ends by itself, it is started again, as by a kubelet."""
        if (pod, container) == ("head", "ray-head"):  # the next pod has an empty /tmp
            (self._volume(pod, 0, "tmp", self._container(pod, container)) / "ray/ray_current_cluster").unlink(True)
        command, variables = self._command(pod, container, number), self.environment(pod, container, number)
        with self._log(pod, container, number).open("ab") as log, self._lock:
            self._running[pod, number, container] = subprocess.Popen(
                command,
                env=variables,
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def run(
        self, pod: str, container: str, command: list[str] | None = None, number: int = 0
    ) -> "subprocess.CompletedProcess[str]":
        """The container's command, or another one in it such as a probe's, to its end."""
        variables = self.environment(pod, container, number)
        arguments = self._isolated(command, pod, number) if command else self._command(pod, container, number)
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 200, "check": False}
        return subprocess.run(arguments, env=variables, cwd="/", **options)

    def running(self, pod: str, container: str, number: int = 0) -> bool:
        process = self._running.get((pod, number, container))
        return process is not None and process.poll() is None

    def log(self, pod: str, container: str, number: int = 0) -> str:
        return self._log(pod, container, number).read_text(errors="replace")

    def kill(self, pod: str, container: str, number: int = 0) -> None:
        """All processes of a container."""
        with self._lock:
            process = self._running.pop((pod, number, container))
        _kill([process])

    def terminate(self, pod: str, container: str, seconds: float, number: int = 0) -> int:
        """SIGTERM to the container's first process; its exit status. With it all others end. Raises TimeoutExpired."""
        with self._lock:
            process = self._running.pop((pod, number, container))
        others = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGTERM)
        status = process.wait(seconds)
        for each in others:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        return status

    def environment(self, pod: str, container: str, number: int = 0) -> dict[str, str]:
        """Nothing of this process's own but the folder of its programs, which the images have on PATH."""
        found = self._container(pod, container)
        variables = {"PATH": f"{Path(sys.executable).parent}:/usr/sbin:/usr/bin:/sbin:/bin", **INJECTED, **self._image}
        for entry in found.get("env", ()):
            variables[entry["name"]] = str(entry["value"]) if "value" in entry else self._referred(entry["valueFrom"])
        if container.startswith("ray-"):
            variables |= {  # of KubeRay
                "RAY_ADDRESS": "127.0.0.1:6379" if pod == "head" else f"{self.name}-head-svc:6379",
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": self._token,
                "RAY_CLUSTER_NAME": self.name,
                "RAY_PORT": "6379",
            }
        return {name: self._localized(value, pod, number, found) for name, value in variables.items()}

    def close(self) -> None:
        """Kills what runs; a worker's Ray would drain for minutes."""
        self._closed.set()
        with self._lock:
            _kill(list(self._running.values()))
            self._running.clear()

    # -- what KubeRay and the kubelet make --------------------------------------------------------------------

    def _restart(self) -> None:
        while not self._closed.wait(RESTART_SECONDS):
            with self._lock:
                for (pod, number, container), process in list(self._running.items()):
                    if process.poll() is not None:
                        print(f"{pod} {number}: {container} has ended with {process.returncode}, and starts again")
                        print(self.log(pod, container, number)[-LOG_SHOWN:])
                        _kill_session(process.pid)
                        self.start(pod, container, number)

    def _log(self, pod: str, container: str, number: int) -> Path:
        return self.folder / f"{pod}-{number}-{container}.log"

    def _container(self, pod: str, name: str) -> Object:
        (found,) = [container for container in self.pod(pod).containers if container["name"] == name]
        return found

    def _command(self, pod: str, name: str, number: int) -> list[str]:
        found = self._container(pod, name)
        if pod == "head" and name == "ray-head":
            command = ["ray", "start", "--head", "--block", f"--node-ip-address={self.address}"]
            command += _flags(self.cluster["spec"]["headGroupSpec"], None)
        elif name == "ray-worker":
            groups = {group["groupName"]: group for group in self.cluster["spec"]["workerGroupSpecs"]}
            group = groups[pod.removeprefix("worker-")]
            labels = ",".join(f"{key}={value}" for key, value in group.get("labels", {}).items())
            command = ["ray", "start", f"--address={self.name}-head-svc:6379", "--block"]
            command += [f"--node-ip-address=127.0.0.{2 + number}", f"--labels={labels}", *_flags(group, number)]
        else:
            command = list(found["command"])
        return self._isolated([self._localized(argument, pod, number, found) for argument in command], pod, number)

    def _isolated(self, command: list[str], pod: str, number: int) -> list[str]:
        """The command in a mount namespace of its own."""
        temporary = self._volume(pod, number, "tmp", self.pod(pod).containers[0])
        folders = (str(self.folder / "hosts"), str(self.folder), str(temporary))
        return ["unshare", "-m", "sh", "-c", NAMESPACE, "sh", *folders, *command]

    def agent(self, number: int) -> str:
        """The URL at which the agent of a worker's Ray tells its health."""
        port = int(self.cluster["spec"]["workerGroupSpecs"][0]["rayStartParams"]["dashboard-agent-listen-port"])
        return f"http://127.0.0.{2 + number}:{port + WORKER_SHIFT * (number + 1)}/api/healthz"

    def router_address(self, number: int) -> str:
        """Where this router listens."""
        return f"127.0.0.{20 * number + 1}"

    def _localized(self, text: str, pod: str, number: int, container: Object) -> str:
        """A text with the addresses and folders of this machine."""
        text = text.replace(f"http://{self.name} --port 80", f"http://{self.name} --port 8000")
        if pod == "router":
            text = text.replace("0.0.0.0", self.router_address(number))
        for mount in container.get("volumeMounts", ()):
            if mount["mountPath"] not in SHARED:
                text = text.replace(mount["mountPath"], str(self._volume(pod, number, mount["name"], container)))
        return text

    def _volume(self, pod: str, number: int, name: str, container: Object) -> Path:
        """The folder of a volume; files of a ConfigMap or Secret are links into `..data`, as a kubelet makes them."""
        (volume,) = [found for found in self.pod(pod).spec["volumes"] if found["name"] == name]
        claim = volume.get("persistentVolumeClaim")
        folder = self.folder / (f"claim-{claim['claimName']}" if claim else f"{pod}-{number}-{name}")
        if folder.exists():
            return folder
        folder.mkdir()
        if source := volume.get("configMap") or volume.get("secret"):
            self._mounted[folder] = pod, number, container, source
            self._write(folder)
        return folder

    def _update_volumes(self) -> None:
        for folder in self._mounted:
            self._write(folder)

    def _write(self, folder: Path) -> None:
        """The files of a volume in a new folder, to which a link is moved."""
        pod, number, container, source = self._mounted[folder]
        self._versions += 1
        content = folder / f"..{self._versions}"
        content.mkdir()
        data = self._data[source.get("name") or source["secretName"]]
        for item in source["items"]:
            file = content / item["path"]
            text = self._localized(data[item["key"]], pod, number, container)
            file.write_text(self._with_models(text))
            # A kubelet's files belong to root and the pod's group; these belong to the user of the processes.
            file.chmod(source.get("defaultMode", 0o644) & 0o700)
            with contextlib.suppress(FileExistsError):
                (folder / item["path"]).symlink_to(Path("..data", item["path"]))
        link = folder / "..new"
        link.symlink_to(content.name)
        link.replace(folder / "..data")

    def _with_models(self, text: str) -> str:
        """A spec with the folders of claims that workers mount: a model's path is one in a worker."""
        for pod in pods(self.objects):
            for container in pod.containers if pod.name.startswith("worker-") else ():
                claims = {volume["name"] for volume in pod.spec["volumes"] if "persistentVolumeClaim" in volume}
                for mount in container["volumeMounts"]:
                    if mount["name"] in claims:
                        text = text.replace(
                            mount["mountPath"], str(self._volume(pod.name, 0, mount["name"], container))
                        )
        return text

    def _referred(self, source: Object) -> str:
        reference = source["secretKeyRef"]
        return self._data[reference["name"]][reference["key"]]


def _kill(processes: "list[subprocess.Popen[bytes]]") -> None:
    found: list[psutil.Process] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            found += [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for each in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()
    for process in processes:
        process.wait()


def _kill_session(leader: int) -> None:
    """What a container leaves that has ended: `ray start` leaves its processes when it fails."""
    for each in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(each.pid) == leader:
                each.kill()


def _data(found: Object) -> dict[str, str]:
    """Of a ConfigMap or Secret, as text."""
    data = found.get("data") or {}
    if found["kind"] == "Secret":
        data = {key: base64.b64decode(value).decode() for key, value in data.items()}
    return {**data, **(found.get("stringData") or {})}


def _flags(group: Object, worker: int | None) -> list[str]:
    """`rayStartParams` as KubeRay writes them, and the memory of the container's limit. worker: its number."""
    parameters: dict[str, str] = dict(group["rayStartParams"])
    if worker is None:
        parameters["max-worker-port"] = str(FIRST_WORKER_PORT - 1)
    else:
        parameters |= {key: str(int(parameters[key]) + WORKER_SHIFT * (worker + 1)) for key in PORTS}
        first = FIRST_WORKER_PORT + worker * WORKER_PORTS
        parameters |= {"min-worker-port": str(first), "max-worker-port": str(first + WORKER_PORTS - 1)}
    limit = group["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"]
    memory = int(limit.removesuffix("Gi")) << 30
    return [f"--memory={memory}", *(f"--{key}={value}" for key, value in parameters.items())]

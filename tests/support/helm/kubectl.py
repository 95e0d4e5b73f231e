"""`kubectl` and `helm` for the commands of the runbook, which act on the processes of a release."""

import base64
import contextlib
import http.server
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import yaml

from support.helm.chart import ROOT
from support.helm.processes import Release

PULL_SECONDS = 8.0  # until KubeRay has made the successor of a pod, and its image is there
SLEEP_SECONDS = 12.0  # at most, of `sleep` in the runbook: volumes change at once here
READY = "--for=jsonpath={.status.readyWorkerReplicas}="
HEAD, CONTROLLER, WORKER = ("head", "ray-head"), ("head", "controller"), ("worker-serving", "ray-worker")
_SCRIPT = """#!{python}
import json, sys, urllib.request
body = json.dumps([{program!r}, *sys.argv[1:]]).encode()
status, output = json.load(urllib.request.urlopen("http://127.0.0.1:{port}", body))
print(output, end="")
sys.exit(status)
"""


class Kubectl:
    """Use it with `with`."""

    def __init__(self, release: Release, workers: int, upgrade: Callable[[str], None] | None = None) -> None:
        """upgrade: of the release, to this tag of the images."""
        self.deleted: list[str] = []
        self._release, self._upgrade = release, upgrade
        self._pods = {"head": ["pod/headrace-head"]}
        self._pods["worker"] = [f"pod/headrace-serving-worker-{number}" for number in range(workers)]
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                arguments = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                try:
                    answer = outer._run(*arguments)
                except Exception as error:
                    answer = 1, f"{error!r}\n"
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(answer).encode())

            def log_message(self, *_: object) -> None: ...

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        folder = release.folder / "bin"
        folder.mkdir(exist_ok=True)
        (folder / "sleep").write_text(
            f"#!{sys.executable}\nimport sys, time\ntime.sleep(min({SLEEP_SECONDS}, float(sys.argv[1])))\n"
        )
        (folder / "sleep").chmod(0o755)
        for program in ("kubectl", "helm"):
            script = folder / program
            script.write_text(
                _SCRIPT.format(python=sys.executable, program=program, port=self._server.server_address[1])
            )
            script.chmod(0o755)
        self._path = f"{folder}:{os.environ['PATH']}"

    def __enter__(self) -> "Kubectl":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()

    def follow(self, heading: str) -> None:
        """Runs the commands below a heading of the page on operations."""
        text = (ROOT / "docs" / "operations.md").read_text().partition(f"\n## {heading}\n")[2]
        commands = text.partition("```sh\n")[2].partition("```")[0]
        environ = os.environ | {"PATH": self._path}
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 900, "check": False}
        done = subprocess.run(["bash", "-c", commands], cwd=ROOT, env=environ, **options)
        assert done.returncode == 0, done.stdout + done.stderr

    def _run(self, program: str, verb: str, *rest: str) -> tuple[int, str]:
        """Exit status and output."""
        match (program, verb, *rest):
            case ("helm", "upgrade", "headrace", "helm/headrace", "--reset-then-reuse-values", "--set", change):
                assert self._upgrade is not None
                self._upgrade(change.removeprefix("image.tag="))
            case ("kubectl", "get", "pods", "-l", selector, "-o", "name"):
                return 0, "".join(f"{name}\n" for name in self._selected(selector))
            case ("kubectl", "delete", name):
                self._delete(name)
            case ("kubectl", "exec", name, "-c", "controller", "--", *command) if name in self._pods["head"]:
                done = self._release.run(*CONTROLLER, list(command))
                return done.returncode, done.stdout + done.stderr
            case ("kubectl", "wait", "--for=condition=Ready", "pod", "-l", selector, "--timeout=10m"):
                assert self._selected(selector) == self._pods["head"]
                return self._wait(self._head_is_ready)
            case ("kubectl", "wait", "raycluster/headrace", condition, "--timeout=30m"):
                count = int(condition.removeprefix(READY))
                return self._wait(lambda: self._ready_workers() == count)
            case ("kubectl", "get", "secret", "headrace-keys", "-o", path):
                key = path.removeprefix("jsonpath={.data.").removesuffix("}")
                return 0, base64.b64encode(self._release.secret(key).encode()).decode()
            case ("kubectl", "patch", "secret", "headrace-keys", "-p", patch):
                for key, value in yaml.safe_load(patch)["stringData"].items():  # kubectl reads it as YAML
                    self._release.replace_secret(key, value)
            case unknown:
                return 1, f"the test knows no command {unknown}\n"
        return 0, ""

    def _selected(self, selector: str) -> list[str]:
        cluster, kind = selector.removeprefix("ray.io/cluster=").split(",ray.io/node-type=")
        assert cluster == self._release.name
        return self._pods[kind]

    def _delete(self, name: str) -> None:
        """SIGTERM to the containers; returns when they have ended, and KubeRay has made the next pod."""
        release = self._release
        self.deleted.append(name)
        if name in self._pods["head"]:
            release.terminate(*CONTROLLER, 60)
            release.terminate(*HEAD, 60)
            release.start(*HEAD)
            release.start(*CONTROLLER)
        else:
            number = self._pods["worker"].index(name)
            grace = release.pod(WORKER[0]).spec["terminationGracePeriodSeconds"]
            release.terminate(*WORKER, grace, number)
            threading.Timer(PULL_SECONDS, release.start, [*WORKER, number]).start()

    def _wait(self, condition: Callable[[], bool]) -> tuple[int, str]:
        deadline = time.monotonic() + 120
        while not condition():
            if time.monotonic() > deadline:
                return 1, "timed out waiting for the condition\n"
            time.sleep(1)
        return 0, "condition met\n"

    def _ready_workers(self) -> int:
        """By the probes of each pod: that of its start, which asks Ray's agent, and then that of its ranks."""
        (container,) = self._release.pod(WORKER[0]).containers
        command = container["readinessProbe"]["exec"]["command"]
        numbers = [n for n in range(len(self._pods["worker"])) if _answers(self._release.agent(n))]
        return sum(self._release.run(*WORKER, command, n).returncode == 0 for n in numbers)

    def _head_is_ready(self) -> bool:
        """By the readiness probes of its containers."""
        return all(self._passes(container) for container in self._release.pod("head").containers)

    def _passes(self, container: dict[str, Any]) -> bool:
        probe = container["readinessProbe"]["httpGet"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        return _answers(f"http://{self._release.address}:{ports[probe['port']]}{probe['path']}")


def _answers(url: str) -> bool:
    with contextlib.suppress(httpx.TransportError):
        return httpx.get(url, timeout=5, trust_env=False).status_code == 200
    return False

"""`kubectl` and `helm` for the commands of the runbook, which act on the processes of a release."""

import http.server
import json
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from support.helm.processes import Release

HEAD, CONTROLLER, WORKER = ("head", "ray-head"), ("head", "controller"), ("worker-serving", "ray-worker")
_SCRIPT = """#!{python}
import json, sys, urllib.request
body = json.dumps([{program!r}, *sys.argv[1:]]).encode()
status, output = json.load(urllib.request.urlopen("http://127.0.0.1:{port}", body))
print(output, end="")
sys.exit(status)
"""


class Kubectl:
    """Use it with `with`; `path` is a PATH with both programs."""

    def __init__(
        self, release: Release, workers: int, upgrade: Callable[[str], None], is_ready: Callable[[], bool]
    ) -> None:
        """upgrade: of the release, to this tag of the images. is_ready: the head pod's probes."""
        self.deleted: list[str] = []
        self._release, self._upgrade, self._is_ready = release, upgrade, is_ready
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
        folder.mkdir()
        for program in ("kubectl", "helm"):
            script = folder / program
            script.write_text(
                _SCRIPT.format(python=sys.executable, program=program, port=self._server.server_address[1])
            )
            script.chmod(0o755)
        self.path = f"{folder}:{os.environ['PATH']}"

    def __enter__(self) -> "Kubectl":
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()

    def _run(self, program: str, verb: str, *rest: str) -> tuple[int, str]:
        """Exit status and output."""
        match (program, verb, *rest):
            case ("helm", "upgrade", "headrace", "helm/headrace", "--reuse-values", "--set", change):
                self._upgrade(change.removeprefix("image.tag="))
            case ("kubectl", "get", "pods", "-l", selector, "-o", "name"):
                return 0, "".join(f"{name}\n" for name in self._selected(selector))
            case ("kubectl", "delete", name):
                self._delete(name)
            case ("kubectl", "exec", name, "-c", "controller", "--", *command) if name in self._pods["head"]:
                if not self._release.running(*CONTROLLER):
                    self._release.start(*CONTROLLER)  # as by the kubelet
                done = self._release.run(*CONTROLLER, list(command))
                return done.returncode, done.stdout + done.stderr
            case ("kubectl", "wait", "--for=condition=Ready", "pod", "-l", selector, "--timeout=10m"):
                assert self._selected(selector) == self._pods["head"]
                return (0, "condition met\n") if self._is_ready() else (1, "timed out\n")
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
            for path in Path("/tmp/ray").glob("ray_current_cluster"):  # a pod's Ray sees its own processes only
                path.unlink()
            release.start(*HEAD)
            release.start(*CONTROLLER)
        else:
            number = self._pods["worker"].index(name)
            grace = release.pod(WORKER[0]).spec["terminationGracePeriodSeconds"]
            release.terminate(*WORKER, grace, number)
            release.start(*WORKER, number)

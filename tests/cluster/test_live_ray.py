"""Controllers in a real Ray that others started: they end, are killed and take over. The replicas have no engine."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_cluster.local import state
from support.child_environment import child_environment

START_SECONDS = 90


class LiveController:
    """One controller as a process."""

    def __init__(self, home: Path, **spec: Any) -> None:
        secret = home.with_suffix(".secret")  # a joined Ray needs it
        if not secret.exists():
            state.write_private(secret, f"{state.new_key()}\n")
        defaults = {
            "admin": {"port": 0},
            "control": {"secret_file": str(secret)},
            "models": [{"source": "smollm2", "replicas": 2}],
        }
        self.home = home
        self.log = home.with_suffix(f".{time.monotonic_ns()}.log")
        # The address of another Ray: it must not be used.
        environ = child_environment(HEADRACE_HOME=str(home), RAY_ADDRESS="192.0.2.55:6379")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "support.cluster.live_controller", json.dumps(defaults | spec)],
            env=environ,
            stdout=subprocess.DEVNULL,
            stderr=self.log.open("w"),
            start_new_session=True,
        )

    def headrace(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        states = [json.loads(path.read_text()) for path in self.home.glob("serve-*.json")]
        (port,) = [str(found["admin_port"]) for found in states if found["pid"] == self.process.pid]
        command = [sys.executable, "-m", "headrace_cluster", *arguments, "--admin-port", port]
        environ = os.environ | {"HEADRACE_HOME": str(self.home)}
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.headrace("status", "--json").stdout)
        return found

    def ranks(self) -> list[tuple[str, int, int]]:
        """Replica, generation and process of each."""
        replicas = self.status()["replicas"]
        return [(r["id"], r["generation"], rank["pid"]) for r in replicas for rank in r["ranks"]]

    def stderr_text(self) -> str:
        return self.log.read_text()

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def _eventually(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.1)


_HOLDER = """
import ray, sys
options = {'include_dashboard': False, 'object_store_memory': 100 << 20, 'log_to_driver': False}
link = ray.init(address='local', **options)
class Other:
    def ping(self): return 1
other = ray.remote(Other).options(name='other', namespace='theirs', num_cpus=0).remote()
ray.get(other.ping.remote())
print(link.address_info['gcs_address'], flush=True)
sys.stdin.readline()
print(ray.get(other.ping.remote()), len(ray.util.list_named_actors(all_namespaces=True)), flush=True)
"""


class JoinedRay:
    """A Ray that others started, with an actor of theirs."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        token = tmp_path / "token"
        token.write_text("0" * 64)
        monkeypatch.setenv("RAY_AUTH_MODE", "token")
        monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _HOLDER],
            env=child_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        self.address = self._read().decode().strip()

    def only_theirs_is_left(self) -> bool:
        """Ends the wait of that process; call it once."""
        assert self._process.stdin is not None
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return self._read().split() == [b"1", b"1"] and self._process.wait(20) == 0

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _read(self) -> bytes:
        assert self._process.stdout is not None
        return self._process.stdout.readline()


@pytest.fixture
def joined_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[JoinedRay]:
    ray = JoinedRay(tmp_path, monkeypatch)
    yield ray
    ray.close()


def test_what_serves_in_a_joined_ray_outlives_its_controller(tmp_path: Path, joined_ray: JoinedRay) -> None:
    """However it ends; the next one takes it up, and only `headrace stop` ends it."""
    home, ray, controllers = tmp_path / "home", {"address": joined_ray.address}, []

    def control(**spec: object) -> LiveController:
        controllers.append(LiveController(home, ray=ray, **spec))
        _eventually(lambda: "is ready after" in controllers[-1].stderr_text() or _ended(controllers[-1]), START_SECONDS)
        assert not _ended(controllers[-1]), controllers[-1].stderr_text()
        return controllers[-1]

    try:
        first = control()
        before = first.ranks()
        assert first.headrace("role", "smollm2-1", "prefill").returncode == 0
        first.process.terminate()
        assert first.process.wait(30) == 0
        assert "the cluster goes on" in first.stderr_text()
        second = control()
        assert second.ranks() == before
        other = LiveController(tmp_path / "other", ray=ray)
        assert other.process.wait(START_SECONDS) == 1 and "with another secret" in other.stderr_text()
        other.close()
        assert not _ended(second), "the one with the right secret goes on"
        os.kill(second.process.pid, signal.SIGSTOP)
        third = control()
        assert third.ranks() == before
        assert [entry["role"] for entry in third.status()["replicas"]] == ["both", "prefill"]
        os.kill(second.process.pid, signal.SIGCONT)
        assert second.process.wait(30) == 1 and "has taken over the cluster" in controllers[1].stderr_text()
        fewer = LiveController(home, ray=ray, models=[{"source": "smollm2", "replicas": 1}])
        assert fewer.process.wait(START_SECONDS) == 1
        assert "smollm2: replicas 2 → 1" in fewer.stderr_text() and "--take-over" in fewer.stderr_text()
        fewer.close()
        assert third.ranks() == before, "one that acts is asked first"
        third.process.kill()
        third.process.wait()
        # Another spec: both are built again, one after the other, and one of three is new.
        fourth = control(models=[{"source": "smollm2", "replicas": 3, "kv_cache_memory": 256 << 20}])
        _eventually(lambda: sorted(r[1] for r in fourth.ranks()) == [1, 2, 2], 120)
        assert fourth.headrace("stop").returncode == 0
        assert list(home.glob("*.json")) == []
        assert joined_ray.only_theirs_is_left()
    finally:
        for live in controllers:
            live.close()


def test_a_replica_without_a_place_waits_while_the_others_serve(tmp_path: Path, joined_ray: JoinedRay) -> None:
    """Three replicas that need a core each where there are two, until one of them is drained."""
    cores = len(os.sched_getaffinity(0))
    models = [{"source": "smollm2", "replicas": cores + 1, "cpu_share": 1.0}]
    live = LiveController(tmp_path / "home", ray={"address": joined_ray.address}, models=models, logs={"files": False})

    def states() -> list[str]:
        return sorted(entry["state"] for entry in live.status()["replicas"])

    try:
        _eventually(lambda: list(live.home.glob("serve-*.json")), START_SECONDS)
        _eventually(lambda: live.headrace("status").returncode == 0, START_SECONDS)
        _eventually(lambda: states() == ["pending", *["ready"] * cores], START_SECONDS)
        waiting = next(entry for entry in live.status()["replicas"] if entry["state"] == "pending")
        assert "it needs 1 x 1 CPU, and Ray has free: 0 CPU" in waiting["note"], waiting
        ready = next(entry["id"] for entry in live.status()["replicas"] if entry["state"] == "ready")
        assert live.headrace("drain", ready).returncode == 0
        assert "a build starts" in live.stderr_text() and not (live.home / "logs").exists()
        _eventually(lambda: states() == ["drained", *["ready"] * cores], 60)
        assert live.headrace("stop").returncode == 0
        assert joined_ray.only_theirs_is_left()
    finally:
        live.close()


def _ended(live: LiveController) -> bool:
    return live.process.poll() is not None

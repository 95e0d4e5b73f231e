"""With a real Ray: serves start, recover, stop and are killed as processes. The replicas have no engine."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from headrace_cluster.local import state
from headrace_cluster.local.child_guard import is_marked
from support.child_environment import child_environment

START_SECONDS = 90


class LiveServe:
    """One serve in a process group of its own."""

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
            [sys.executable, "-m", "support.cluster.live_serve", json.dumps(defaults | spec)],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=self.log.open("w"),
            start_new_session=True,
        )
        self.folder = ""

    def state(self) -> dict[str, Any]:
        """Of its state file."""
        files = [json.loads(path.read_text()) for path in self.home.glob("serve-*.json")]
        (found,) = [each for each in files if each["pid"] == self.process.pid]
        return dict(found)

    def headrace(self, *arguments: str) -> "subprocess.CompletedProcess[str]":
        command = [
            sys.executable,
            "-m",
            "headrace_cluster",
            *arguments,
            "--admin-port",
            str(self.state()["admin_port"]),
        ]
        environ = os.environ | {"HEADRACE_HOME": str(self.home)}
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.headrace("status", "--json").stdout)
        return found

    def controller(self) -> int:
        """Its process id; 0 while there is none."""
        done = self.headrace("status", "--json")
        return int(json.loads(done.stdout)["controller"]["pid"]) if done.returncode == 0 else 0

    def await_ready(self) -> None:
        _eventually(lambda: "is ready after" in self.stderr_text() or self.process.poll() is not None, START_SECONDS)
        assert self.process.poll() is None, self.stderr_text()
        self.folder = next(folder for folder in map(_ray_folder, _children(self.process.pid)) if folder)

    def stderr_text(self) -> str:
        return self.log.read_text()

    def remaining(self) -> list[int]:
        """Processes that this serve started and that still run."""
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
        return [pid for pid in pids if pid != os.getpid() and is_marked(pid, "unknown", self.folder)]

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def _children(pid: int) -> list[int]:
    found = []
    for entry in os.listdir("/proc"):
        try:
            if entry.isdigit() and int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry))
        except OSError:
            continue
    return found


def _ray_folder(pid: int) -> str:
    """The log folder of a Ray process; empty for other processes."""
    command = Path(f"/proc/{pid}/cmdline").read_text()
    before, found, _ = command.partition("/session_2")
    return before[before.rindex("/tmp/") :] if found else ""


def _has_other_controller(live: LiveServe, pid: int) -> bool:
    return live.controller() not in (0, pid)


def _eventually(condition: Callable[[], object], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def serves(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServe, LiveServe, LiveServe]]:
    """Three side by side: two that work, one whose model fails to start."""
    base = tmp_path_factory.mktemp("live")
    lean = {"dashboard": False}
    refused = [{"source": "smollm2", "name": "refuse-last", "tp": 2}]
    found = (LiveServe(base / "a"), LiveServe(base / "b", ray=lean), LiveServe(base / "c", ray=lean, models=refused))
    yield found
    for live in found:
        live.close()


def test_a_replica_that_cannot_start_ends_serve_with_its_sentence(
    serves: tuple[LiveServe, LiveServe, LiveServe],
) -> None:
    refused = serves[2]
    assert refused.process.wait(START_SECONDS) == 1
    # The sentence is that of the causing rank, although the other one fails, too.
    assert "error: too little memory on the last rank" in refused.stderr_text()
    assert "Traceback" not in refused.stderr_text()
    assert list(refused.home.glob("serve-*")) == list(refused.home.glob("ray-token-*")) == []
    assert list(refused.home.glob("logs/headrace-*/ray/worker-*")), "logs are kept at the path in the message"


def test_two_serves_side_by_side_recover_and_stop(serves: tuple[LiveServe, LiveServe, LiveServe]) -> None:
    first, second, _ = serves
    for live in (first, second):
        live.await_ready()
    cores = len(os.sched_getaffinity(0))
    status = first.status()
    assert [(r["id"], r["state"], r["generation"]) for r in status["replicas"]] == [
        ("smollm2-0", "ready", 1),
        ("smollm2-1", "ready", 1),
    ]
    assert f"{max(1, cores // 2)} thread" in first.stderr_text()  # set before a rank's libraries load

    # A killed rank is removed at once, reported, and rebuilt as the next generation.
    victim = status["replicas"][0]["ranks"][0]["pid"]
    os.kill(victim, signal.SIGKILL)
    _eventually(lambda: first.status()["replicas"][0]["generation"] == 2, 5)
    _eventually(lambda: first.status()["replicas"][0]["state"] == "ready", 15)
    assert f"(process {victim}) was killed" in first.stderr_text()
    assert first.status()["replicas"][1]["generation"] == 1

    # After SIGKILL no process remains; the other serve is not affected.
    first.process.kill()
    _eventually(lambda: not first.remaining(), 10)
    _eventually(lambda: list(first.home.glob("*-*")) == [], 2)
    assert [r["state"] for r in second.status()["replicas"]] == ["ready", "ready"]
    assert first.process.stdout is not None and first.process.stdout.read() == b""

    # Ctrl-C reaches the whole process group; the stop is still in order.
    os.killpg(second.process.pid, signal.SIGINT)
    assert second.process.wait(30) == 0
    assert second.stderr_text().rstrip().endswith(" stopped")
    assert "was killed" not in second.stderr_text()
    assert second.remaining() == []
    assert list(second.home.glob("*-*")) == []


def test_a_new_controller_adopts_all_ranks(tmp_path: Path) -> None:
    models = [{"source": "smollm2", "name": "pair", "tp": 2}]
    live = LiveServe(tmp_path / "home", ray={"dashboard": False}, models=models)
    try:
        live.await_ready()
        before = live.status()
        for signal_number in (signal.SIGKILL, signal.SIGSTOP):  # a hung controller counts as lost
            controller = live.status()["controller"]["pid"]
            os.kill(controller, signal_number)
            _eventually(partial(_has_other_controller, live, controller), 40)
            _eventually(lambda: live.status()["replicas"] == before["replicas"], 10)
        # The new controller detects the end of a rank, and both ranks of the next build are new.
        pids = [rank["pid"] for rank in before["replicas"][0]["ranks"]]
        os.kill(pids[1], signal.SIGKILL)
        _eventually(lambda: live.status()["replicas"][0]["generation"] == 2, 5)
        _eventually(lambda: live.status()["replicas"][0]["state"] == "ready", 20)
        assert f"rank 1 of pair-0 (process {pids[1]}) was killed" in live.stderr_text()
        assert not {rank["pid"] for rank in live.status()["replicas"][0]["ranks"]} & set(pids)
        assert live.headrace("stop").returncode == 0 and live.remaining() == []
    finally:
        live.close()


def test_a_paused_gcs_and_a_rank_that_is_killed_meanwhile(tmp_path: Path) -> None:
    """Nothing else ends, and the killed one is built again once the GCS answers."""
    live = LiveServe(tmp_path / "home", ray={"dashboard": False})
    try:
        live.await_ready()
        before = live.status()["replicas"]
        controller = live.controller()
        (gcs,) = [pid for pid in _children(live.process.pid) if "gcs_server" in _program(pid)]
        os.kill(gcs, signal.SIGSTOP)
        try:
            time.sleep(10)
            assert live.status()["replicas"] == before
            os.kill(before[1]["ranks"][0]["pid"], signal.SIGKILL)
            time.sleep(20)
        finally:
            os.kill(gcs, signal.SIGCONT)
        _eventually(lambda: [r["generation"] for r in live.status()["replicas"]] == [1, 2], 60)
        _eventually(lambda: [r["state"] for r in live.status()["replicas"]] == ["ready", "ready"], 60)
        assert live.status()["replicas"][0]["ranks"] == before[0]["ranks"]
        assert live.controller() == controller and live.process.poll() is None
        assert live.stderr_text().count("has sent no health message") <= 1
        assert live.headrace("stop").returncode == 0
    finally:
        live.close()


def _program(pid: int) -> str:
    """The path of its program; empty when it has just ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0].decode()
    except OSError:
        return ""


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


def test_in_a_joined_ray_only_our_actors_end(tmp_path: Path, joined_ray: JoinedRay) -> None:
    live = None
    try:
        early = LiveServe(tmp_path / "early", ray={"address": joined_ray.address}, cluster="early")
        try:
            _eventually(lambda: "joining" in early.stderr_text(), START_SECONDS)
            os.killpg(early.process.pid, signal.SIGTERM)
            early.process.wait(60)
        finally:
            early.close()
        live = LiveServe(tmp_path / "home", ray={"address": joined_ray.address})
        _eventually(lambda: live is not None and "is ready after" in live.stderr_text(), START_SECONDS)
        stopped = live.headrace("stop")
        assert (stopped.returncode, stopped.stdout) == (0, "")
        assert live.process.wait(1) == 0
        assert joined_ray.only_theirs_is_left()
    finally:
        if live is not None:
            live.close()


def test_what_serves_in_a_joined_ray_outlives_its_controller(tmp_path: Path, joined_ray: JoinedRay) -> None:
    """However it ends; the next one takes it up, and only `headrace stop` ends it."""
    home, ray, controllers = tmp_path / "home", {"address": joined_ray.address}, []

    def control(**spec: object) -> LiveServe:
        controllers.append(LiveServe(home, ray=ray, **spec))
        _eventually(lambda: "is ready after" in controllers[-1].stderr_text() or _ended(controllers[-1]), START_SECONDS)
        assert not _ended(controllers[-1]), controllers[-1].stderr_text()
        return controllers[-1]

    def replicas(live: LiveServe) -> list[tuple[str, int, int]]:
        document = live.status()["replicas"]
        return [(r["id"], r["generation"], rank["pid"]) for r in document for rank in r["ranks"]]

    try:
        first = control()
        before = replicas(first)
        assert first.headrace("role", "smollm2-1", "prefill").returncode == 0
        first.process.terminate()
        assert first.process.wait(30) == 0
        assert "the cluster goes on" in first.stderr_text()
        second = control()
        assert replicas(second) == before
        other = LiveServe(tmp_path / "other", ray=ray)
        assert other.process.wait(START_SECONDS) == 1 and "with another secret" in other.stderr_text()
        other.close()
        assert not _ended(second), "the one with the right secret goes on"
        os.kill(second.process.pid, signal.SIGSTOP)
        third = control()
        assert replicas(third) == before
        assert [entry["role"] for entry in third.status()["replicas"]] == ["both", "prefill"]
        os.kill(second.process.pid, signal.SIGCONT)
        assert second.process.wait(30) == 1 and "has taken over the cluster" in controllers[1].stderr_text()
        third.process.kill()
        third.process.wait()
        # Another spec: both are built again, one after the other, and one of three is new.
        fourth = control(models=[{"source": "smollm2", "replicas": 3, "kv_cache_memory": 256 << 20}])
        _eventually(lambda: sorted(r[1] for r in replicas(fourth)) == [1, 2, 2], 120)
        assert fourth.headrace("stop").returncode == 0
        assert list(home.glob("*.json")) == []
        assert joined_ray.only_theirs_is_left()
    finally:
        for live in controllers:
            live.close()


def test_a_start_survives_any_number_of_controllers(tmp_path: Path, joined_ray: JoinedRay) -> None:
    """Each is killed once it shows that the ranks load; the last one finds the same processes, ready."""
    home, models = tmp_path / "home", [{"source": "smollm2", "name": "slow", "tp": 2}]
    controllers: list[LiveServe] = []

    def ranks() -> list[int]:
        (replica,) = controllers[-1].status()["replicas"]
        assert (replica["generation"], replica["state"]) == (1, "starting"), replica
        return [rank["pid"] for rank in replica["ranks"]] if replica["note"] == "loading nothing" else []

    def control() -> LiveServe:
        controllers.append(live := LiveServe(home, ray={"address": joined_ray.address}, models=models))
        _eventually(lambda: any(str(live.process.pid) in path.read_text() for path in home.glob("serve-*.json")), 90)
        _eventually(live.controller, START_SECONDS)
        return live

    try:
        control()
        _eventually(ranks, START_SECONDS)
        before = ranks()
        for _ in range(2):
            controllers[-1].close()
            control()
        _eventually(lambda: "is ready after" in controllers[-1].stderr_text(), START_SECONDS)
        (replica,) = controllers[-1].status()["replicas"]
        assert (replica["generation"], [rank["pid"] for rank in replica["ranks"]]) == (1, before)
        assert controllers[-1].headrace("stop").returncode == 0 and joined_ray.only_theirs_is_left()
    finally:
        for live in controllers:
            live.close()


def test_a_replica_without_a_place_waits_while_the_others_serve(tmp_path: Path, joined_ray: JoinedRay) -> None:
    """Three replicas that need a core each where there are two, until one of them is drained."""
    cores = len(os.sched_getaffinity(0))
    models = [{"source": "smollm2", "replicas": cores + 1, "cpu_share": 1.0}]
    live = LiveServe(tmp_path / "home", ray={"address": joined_ray.address}, models=models, logs={"files": False})

    def states() -> list[str]:
        return sorted(entry["state"] for entry in live.status()["replicas"])

    try:
        _eventually(lambda: list(live.home.glob("serve-*.json")), START_SECONDS)
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


def _ended(live: LiveServe) -> bool:
    return live.process.poll() is not None

"""The server that a client command chooses: by any port, by name, the only one; several are listed, not changed."""

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

from headrace_cluster.cli.servers import ServerChoice, choose, no_match_error
from headrace_cluster.errors import RayStartError, ServerChoiceError
from headrace_cluster.launch.banner import banner
from headrace_cluster.launch.serve import Serve
from headrace_cluster.launch.signals import StopSignals
from headrace_cluster.local import state
from headrace_cluster.local.child_guard import SERVE_ID_VARIABLE
from headrace_cluster.local.processes import ProcessId
from headrace_cluster.local.run_logs import runs, server_of
from headrace_cluster.local.state import ServeState
from headrace_cluster.spec.cluster_spec import parse_spec
from headrace_cluster.spec.key_rules import KeyRules
from support.cluster.scripted_admin import ScriptedAdmin

STATUS: dict[str, Any] = {"replicas": [], "routers": []}


def _server(base: int, **given: Any) -> ServeState:
    """HTTP at `base`, gRPC at base + 1, admin at base + 2, metrics at base + 3."""
    known: dict[str, Any] = {
        "pid": base * 10,
        "started": 1,
        "cluster": "headrace",
        "admin_url": f"http://127.0.0.1:{base + 2}",
        "admin_key": "the-key",
        "admin_port": base + 2,
        "http_url": f"http://127.0.0.1:{base}",
        "grpc_address": f"127.0.0.1:{base + 1}",
        "control_address": f"127.0.0.1:{base + 4}",
        "metrics": (f"127.0.0.1:{base + 3}",),
        "models": ("smollm2",),
        "ray_dashboard": f"http://127.0.0.1:{base + 5}",
    }
    return ServeState(**(known | given))


FIRST = _server(8000)
SECOND = _server(9000, cluster="blue", models=("tiny", "Qwen/Qwen3-0.6B"))
BOTH = [FIRST, SECOND]


@pytest.mark.parametrize("port", range(9000, 9006))
def test_any_port_finds_its_server(port: int) -> None:
    assert choose(ServerChoice(port=port, given=f"--port {port}"), BOTH) is SECOND
    assert choose(ServerChoice(names=(str(port),), given=str(port)), BOTH) is SECOND


@pytest.mark.parametrize("name", ["blue", "tiny", "Qwen/Qwen3-0.6B"])
def test_a_name_is_a_clusters_or_a_models(name: str) -> None:
    assert choose(ServerChoice(names=(name,)), BOTH) is SECOND


def test_the_only_one_needs_no_choice() -> None:
    assert choose(ServerChoice(), [SECOND]) is SECOND
    assert choose(ServerChoice(), []) is None


def test_the_admin_port_is_the_admin_port() -> None:
    """--port matches any port; --admin-port only the admin port."""
    assert choose(ServerChoice(admin_port=9002), BOTH) is SECOND
    assert choose(ServerChoice(admin_port=9000), BOTH) is None


def test_all_criteria_must_match() -> None:
    assert choose(ServerChoice(port=9000, admin_port=9002, names=("blue", "tiny")), BOTH) is SECOND
    assert choose(ServerChoice(port=8000, admin_port=9002), BOTH) is None
    assert choose(ServerChoice(port=9000, names=("smollm2",)), BOTH) is None


@pytest.mark.parametrize(
    ("choice", "servers", "words"),
    [
        (ServerChoice(), BOTH, "2 servers run"),
        (
            ServerChoice(names=("headrace",), given="--cluster headrace"),
            [FIRST, _server(7000)],
            "--cluster headrace fits 2",
        ),
        (
            ServerChoice(port=9003, given="--port 9003"),
            [SECOND, _server(7000, metrics=("127.0.0.1:9003",))],
            "fits 2 servers",
        ),
    ],
)
def test_several_are_listed(choice: ServerChoice, servers: list[ServeState], words: str) -> None:
    with pytest.raises(ServerChoiceError) as raised:
        choose(choice, servers)
    assert words in str(raised.value) and "--port" in str(raised.value)
    assert str(raised.value).count("HTTP") == 2


def test_a_choice_without_a_match_lists_running_servers() -> None:
    sentence = str(no_match_error(ServerChoice(port=9999, given="--port 9999"), BOTH))
    assert "no server runs with --port 9999" in sentence and "\n" not in sentence
    assert "headrace (smollm2, HTTP 8000, admin 8002, process 80000)" in sentence
    assert "blue (tiny, Qwen/Qwen3-0.6B, HTTP 9000, admin 9002, process 90000)" in sentence


@pytest.mark.parametrize(
    ("server", "flag"), [(FIRST, "--port 8000"), (_server(9000, http_url="", grpc_address=""), "--admin-port 9002")]
)
def test_the_banner_has_commands_that_reach_this_server(server: ServeState, flag: str, monkeypatch: Any) -> None:
    monkeypatch.setenv("HEADRACE_COMMAND", "../headrace")
    shown = banner(server, {}, {}, 1.0, keys=KeyRules.of(parse_spec({})))
    assert ("(../headrace router --controller " in str(shown.rows)) != bool(server.http_url)
    hints = shown.hint.splitlines()
    assert f"Stop it:     Ctrl-C, or ../headrace stop {flag}" in hints
    assert f"Look at it:  ../headrace status {flag}" in hints
    assert (f"Talk to it:  ../headrace chat {flag}" in hints) == bool(server.http_url)


def test_a_serve_is_found_from_the_beginning_of_its_start_until_its_end(
    monkeypatch: pytest.MonkeyPatch, private_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[ServeState] = []

    def connect(*_: object) -> None:
        seen.extend(state.running())
        raise RayStartError("enough")

    monkeypatch.setenv(SERVE_ID_VARIABLE, "")  # restored at the end
    monkeypatch.setattr("headrace_cluster.launch.serve.LocalRay", connect)
    monkeypatch.setattr("headrace_cluster.launch.serve.add_log_file", lambda _config: None)
    monkeypatch.setattr(StopSignals, "install", lambda _signals: None)
    monkeypatch.setattr("headrace_cluster.launch.serve.use_log_format", lambda _format: None)
    spec = parse_spec({"cluster": "blue", "routers": {"port": 0, "grpc_port": 0}, "admin": {"port": 0}})
    assert Serve(spec).run() == 1
    (server,) = seen
    assert (server.pid, server.cluster, server.models, server.starting) == (os.getpid(), "blue", ("smollm2",), True)
    assert len(server.ports) == 3 and time.time() - server.since < 60
    (run,) = runs()
    assert capsys.readouterr().err.splitlines()[-2:] == [f"headrace: logs: {run}", "headrace: enough"]
    kept = server_of(run)
    assert kept is not None and (kept.ports, kept.admin_key) == (server.ports, "")
    assert list(private_home.glob("*.json")) == [], "and not after its end"


# -- as commands ----------------------------------------------------------------------------------------------------


class FakeServe:
    """A process in place of a serve, with its state file and an admin API."""

    def __init__(self, **given: Any) -> None:
        self.process = subprocess.Popen(["sleep", "600"])
        known = ProcessId.of(self.process.pid)
        assert known is not None
        self.admin = ScriptedAdmin({"/status": [(200, STATUS)], "/stop": [(202, {})]})
        admin = {"admin_url": f"http://127.0.0.1:{self.admin.port}", "admin_port": self.admin.port}
        self.state = _server(20_000, **({"pid": known.pid, "started": known.started, **admin} | given))
        self.path = state.save(self.state)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self.admin.close()


@pytest.fixture
def start_server() -> Iterator[Callable[..., FakeServe]]:
    made: list[FakeServe] = []

    def make(**given: Any) -> FakeServe:
        made.append(FakeServe(**given))
        return made[-1]

    yield make
    for server in made:
        server.close()


def _run(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "headrace_cluster", *arguments]
    environ = os.environ | environment
    return subprocess.run(command, capture_output=True, text=True, timeout=30, env=environ, check=False)


def test_a_command_with_an_unused_port_changes_no_server(start_server: Callable[..., FakeServe]) -> None:
    server = start_server()
    for arguments, environment in (
        (("stop", "--port", "9999"), {}),
        (("stop", "9999"), {}),
        (("stop", "--admin-port", "20000"), {}),
        (("stop", "--cluster", "green"), {}),
        (("stop",), {"HEADRACE_PORT": "9999"}),
        (("status", "--port", "9999"), {}),
        (("drain", "m-0", "--port", "9999"), {}),
        (("rollout", "--port", "9999"), {}),
        (("chat", "--once", "x", "--cluster", "green"), {}),
    ):
        done = _run(*arguments, **environment)
        assert (done.returncode, done.stdout) == (1, ""), arguments
        assert "no server runs with " in done.stderr and "HTTP 20000" in done.stderr
        assert len(done.stderr.splitlines()) == 1
    assert server.alive and server.admin.requests == []


def test_several_and_no_choice_lists_them(start_server: Callable[..., FakeServe]) -> None:
    first, second = start_server(), start_server(cluster="blue", http_url="http://127.0.0.1:21000")
    for command in (("stop",), ("status", "--json"), ("role", "m-0", "both"), ("profile",), ("chat", "--once", "x")):
        done = _run(*command)
        assert (done.returncode, done.stdout) == (2, ""), command
        assert "2 servers run" in done.stderr and "HTTP 20000" in done.stderr and "HTTP 21000" in done.stderr
    assert first.alive and second.alive and first.admin.requests == second.admin.requests == []
    assert _run("status", "blue").returncode == 0
    assert _run("status", HEADRACE_PORT="20000").returncode == 0
    assert _run("status", HEADRACE_PORT="20001").returncode == 2, "both have it"
    assert _run("stop", "--cluster", "blue").returncode == 0
    assert first.alive and not second.alive


def test_the_only_one_is_stopped_whatever_its_ports(start_server: Callable[..., FakeServe]) -> None:
    server = start_server()
    assert _run("status").returncode == 0
    assert json.loads(_run("status", "20001", "--json").stdout) == STATUS
    done = _run("stop")
    assert done.returncode == 0 and done.stderr.endswith("headrace: stopped\n")
    assert server.process.wait(5) == -signal.SIGTERM


_ROUTER_EXTRA = """
import pkgutil, sys
for name in ("torch", "transformers", "ray", "psutil", "pynvml", "safetensors", "gguf"):
    sys.modules[name] = None  # its import fails
import headrace_cluster.cli
for module in pkgutil.walk_packages(headrace_cluster.cli.__path__, "headrace_cluster.cli."):
    __import__(module.name)
sys.exit(headrace_cluster.cli.main())
"""


def test_client_commands_run_with_the_extra_router_alone(start_server: Callable[..., FakeServe]) -> None:
    start_server()
    command = [sys.executable, "-c", _ROUTER_EXTRA, "status", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == STATUS


def test_a_flag_comes_before_the_environment(start_server: Callable[..., FakeServe]) -> None:
    start_server()
    assert _run("status", "--port", "20000", HEADRACE_ADMIN_PORT="1").returncode == 0
    assert _run("status", HEADRACE_PORT="20000", HEADRACE_ADMIN_PORT="1").returncode == 1
    assert _run("status", HEADRACE_PORT="many").returncode == 2


def test_a_starting_server_is_found_and_stopped(start_server: Callable[..., FakeServe]) -> None:
    server = start_server(starting=True, admin_url="http://127.0.0.1:0", admin_port=0)
    done = _run("status")
    assert (done.returncode, done.stdout) == (1, "") and "is starting and cannot answer yet" in done.stderr
    assert "is starting" in _run("chat", "--once", "x").stderr
    assert _run("stop", "--port", "20000").returncode == 0
    assert server.process.wait(5) == -signal.SIGTERM


def test_a_server_of_another_user_is_reached_with_its_key(start_server: Callable[..., FakeServe]) -> None:
    server = start_server()
    server.path.unlink()
    assert _run("status", "--admin-port", str(server.admin.port), HEADRACE_ADMIN_KEY="the-key").returncode == 0
    wrong = _run("status", "--admin-port", str(server.admin.port), HEADRACE_ADMIN_KEY="another")
    assert (wrong.returncode, wrong.stderr) == (1, "headrace: the admin key is wrong\n")


def test_chat_does_not_use_a_server_that_does_not_match(start_server: Callable[..., FakeServe]) -> None:
    """An admin port without a server gives no address of the API: port 8000 must not be used instead."""
    unmatched = _run("chat", "--once", "x", "--admin-port", "1")
    assert unmatched.returncode == 1 and "no server runs with --admin-port 1" in unmatched.stderr
    server = start_server(http_url="", grpc_address="")
    alone = _run("chat", "--once", "x", "--port", str(server.admin.port))
    assert alone.returncode == 1 and "are started elsewhere" in alone.stderr

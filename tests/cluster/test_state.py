"""State files, names, ports, process identity."""

import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from headrace_cluster import naming, ports, state
from headrace_cluster.errors import StateError
from headrace_cluster.naming import ReplicaName
from headrace_cluster.processes import ProcessId
from headrace_cluster.state import ServeState
from headrace_proto.errors import ListenError


def _state(process: ProcessId, admin_port: int = 8002) -> ServeState:
    url = f"http://127.0.0.1:{admin_port}"
    return ServeState(process.pid, process.started, "headrace", url, state.new_key(), admin_port, models=("m",))


def _me() -> ProcessId:
    process = ProcessId.of(os.getpid())
    assert process is not None
    return process


def test_a_state_file_is_private_and_comes_back(private_home: Path) -> None:
    saved = _state(_me())
    path = state.save(saved)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(private_home.stat().st_mode) == 0o700
    assert state.load(8002) == saved
    assert list(private_home.iterdir()) == [path]  # no temporary file stays


def test_a_reused_pid_is_not_taken_for_the_server() -> None:
    me = _me()
    state.save(_state(ProcessId(me.pid, me.started - 1)))
    assert state.load(8002) is None
    assert state.running() == []


def test_running_servers_by_admin_port() -> None:
    for port in (9002, 8002):
        state.save(_state(_me(), port))
    assert [entry.admin_port for entry in state.running()] == [8002, 9002]


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": "x"}'])
def test_a_broken_file_counts_as_no_server(text: str) -> None:
    state.write_private(state.state_path(8002), text)
    assert state.load(8002) is None


def test_a_home_that_is_a_file_is_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "file"))
    with pytest.raises(StateError, match="set HEADRACE_HOME"):
        state.home()


def test_a_zombie_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    process = ProcessId.of(child.pid)
    assert process is not None and process.alive
    assert process.signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, not yet reaped
    assert not process.alive
    assert not process.signal(signal.SIGKILL)
    child.wait()


def test_names_lead_back() -> None:
    name = ReplicaName("tiny.v1-0", 3)
    assert naming.parse_rank(name.rank(2)) == (name, 2)
    assert naming.parse_group(name.group("blue"), "blue") == name
    assert naming.parse_group(name.group("blue"), "green") is None
    assert naming.parse_rank(naming.CONTROLLER) is None
    assert naming.parse_rank("somebody-elses-actor") is None


@pytest.mark.parametrize(
    ("model", "name"), [("smollm2", "smollm2-1"), ("Qwen/Qwen3-0.6B", "Qwen3-0.6B-1"), ("a b:c", "a-b-c-1")]
)
def test_replica_ids(model: str, name: str) -> None:
    assert naming.replica_id(model, 1) == name


@pytest.mark.parametrize("reuse", [False, True])
def test_a_port_in_use_is_named_with_its_flag(reuse: bool) -> None:
    with socket.socket() as taken:
        if reuse:
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ListenError, match=f"port {port} on 127.0.0.1 is in use; choose another with --grpc-port"):
            ports.check_free("127.0.0.1", port, "--grpc-port")
    ports.check_free("127.0.0.1", port, "--grpc-port")
    ports.check_free("127.0.0.1", 0, "--grpc-port")


def test_a_host_that_is_not_ours_is_a_sentence() -> None:
    with pytest.raises(ListenError, match="cannot be listened on"):
        ports.check_free("203.0.113.9", 8000, "--port")


def test_addresses() -> None:
    assert ports.host_port("::1", 5) == "[::1]:5"
    assert ports.host_port("127.0.0.1", 5) == "127.0.0.1:5"
    assert ports.reachable("0.0.0.0") == "127.0.0.1"

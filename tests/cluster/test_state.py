"""State files, names, ports, process identity."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace_base.private_file import PrivateFileError
from headrace_cluster.core import naming
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.errors import StateError
from headrace_cluster.local import state
from headrace_cluster.local.processes import ProcessId
from headrace_cluster.local.state import ServeState
from headrace_cluster.local.tls_client import reachable


def _state(process: ProcessId, admin_port: int = 8002, **given: Any) -> ServeState:
    url = f"http://127.0.0.1:{admin_port}"
    known = {"models": ("m",), "metrics": ("127.0.0.1:9003",)} | given
    return ServeState(process.pid, process.started, "headrace", url, state.new_key(), admin_port, **known)


def _me() -> ProcessId:
    process = ProcessId.of(os.getpid())
    assert process is not None
    return process


def test_a_state_file_is_private_and_can_be_read_back(private_home: Path) -> None:
    saved = _state(_me())
    path = state.save(saved)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(private_home.stat().st_mode) == 0o700
    assert state.running() == [saved]
    assert list(private_home.iterdir()) == [path]  # no temporary file stays


def test_state_that_others_could_change_is_refused(private_home: Path) -> None:
    path = state.save(_state(_me()))
    path.chmod(0o644)
    with pytest.raises(PrivateFileError, match=f"chmod 600 {path}"):
        state.running()
    path.chmod(0o600)
    path.rename(private_home / "elsewhere")
    path.symlink_to(private_home / "elsewhere")
    assert state.running() == [], "a link in the folder is not ours"
    private_home.chmod(0o777)
    with pytest.raises(StateError, match=f"chmod 700 {private_home}"):
        state.home()


def test_a_reused_pid_does_not_match() -> None:
    me = _me()
    ended = _state(ProcessId(me.pid, me.started - 1))
    state.save(ended)
    assert state.running() == []


def test_running_servers_by_start(private_home: Path) -> None:
    others = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    try:
        for port, since, child in ((9002, 7, others[0]), (8002, 9, others[1])):
            process = ProcessId.of(child.pid)
            assert process is not None
            assert state.save(_state(process, 0, since=since, starting=True)) == state.save(
                _state(process, port, since=since)
            )
        assert [(entry.admin_port, entry.starting) for entry in state.running()] == [(9002, False), (8002, False)]
    finally:
        for child in others:
            child.kill()
            child.wait()
    assert state.running() == []
    assert list(private_home.iterdir()) == [], "files of killed processes are removed"


def test_the_ports_of_a_server() -> None:
    addresses = {"http_url": "http://[::1]:9000", "grpc_address": "[::1]:9001", "control_address": "10.0.0.1:9004"}
    saved = _state(_me(), 9002, ray_dashboard="http://127.0.0.1:8265", **addresses)
    assert saved.ports == {9000, 9001, 9002, 9003, 9004, 8265}
    assert _state(_me(), 0, http_url="http://127.0.0.1:0").ports == {9003}, "a port chosen by the system is unknown"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"pid": 1}', '{"pid": "x"}'])
def test_a_broken_file_counts_as_no_server(text: str) -> None:
    state.write_private(state.save(_state(_me())), text)
    assert state.running() == []


def test_a_home_that_is_a_file_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_HOME", str(tmp_path / "file"))
    with pytest.raises(StateError, match="set HEADRACE_HOME"):
        state.home()


def test_a_zombie_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-S", "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
    process = ProcessId.of(child.pid)
    assert process is not None and process.alive
    process.signal(signal.SIGKILL)
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # ended, not yet reaped
    assert not process.alive
    child.wait()


def test_names_can_be_parsed() -> None:
    name = ReplicaName("tiny.v1-0", 3)
    assert naming.parse_rank(name.rank(2)) == (name, 2)
    assert naming.parse_group(name.group("blue"), "blue") == name
    assert naming.parse_group(name.group("blue"), "green") is None
    assert naming.parse_rank("another-actor") is None


@pytest.mark.parametrize(
    ("model", "name"), [("smollm2", "smollm2-1"), ("Qwen/Qwen3-0.6B", "Qwen3-0.6B-1"), ("a b:c", "a-b-c-1")]
)
def test_replica_ids(model: str, name: str) -> None:
    assert naming.replica_id(model, 1) == name


def test_a_client_reaches_a_listener_on_all_interfaces() -> None:
    assert reachable("0.0.0.0") == "127.0.0.1"

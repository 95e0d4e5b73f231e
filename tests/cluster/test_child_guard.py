"""The child-process guard kills processes with its mark, and no others."""

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace_cluster.local import child_guard
from headrace_cluster.local.cleanup import Cleanup
from headrace_cluster.local.processes import SERVE_ID_VARIABLE

_SLEEP = "import time; print(flush=True); time.sleep(60)"

Spawn = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    children: list[subprocess.Popen[bytes]] = []

    def start(code: str = _SLEEP, **options: object) -> "subprocess.Popen[bytes]":
        child = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, **options)  # type: ignore[call-overload]
        children.append(child)
        assert child.stdout is not None
        child.stdout.readline()
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()


def _start_guard(mark: child_guard.ProcessMark) -> "subprocess.Popen[bytes]":
    assert mark.folder is not None
    command = [sys.executable, "-I", "-S", child_guard.__file__, mark.variable, mark.folder]
    return subprocess.Popen(command, stdin=subprocess.PIPE)


@pytest.fixture
def mark(tmp_path: Path) -> child_guard.ProcessMark:
    (tmp_path / "ray").mkdir()
    return child_guard.ProcessMark(f"HEADRACE_SERVE_ID={os.urandom(8).hex()}", str(tmp_path / "ray"))


def test_marked_processes_are_killed(spawn: Spawn, mark: child_guard.ProcessMark, tmp_path: Path) -> None:
    name, _, value = mark.variable.partition("=")
    by_environment = spawn(env=os.environ | {name: value})
    other_value = spawn(env=os.environ | {name: value + "0"})
    by_file = spawn(f"log = open({str(tmp_path / 'ray' / 'log')!r}, 'w'); {_SLEEP}")
    other_folder = spawn(f"log = open({str(tmp_path / 'ray-log')!r}, 'w'); {_SLEEP}")
    (tmp_path / "key").write_text("x")
    process = _start_guard(mark)
    assert process.stdin is not None
    process.stdin.write(f"remove {tmp_path / 'key'}\n".encode())
    process.stdin.flush()
    time.sleep(0.2)
    assert by_environment.poll() is None  # no effect while the other end of the pipe is open
    process.stdin.close()
    assert process.wait(30) == 0
    assert by_environment.wait(30) == by_file.wait(30) == -9
    assert other_value.poll() is None and other_folder.poll() is None
    assert not (tmp_path / "ray").exists() and not (tmp_path / "key").exists()


def test_an_orderly_end_stops_the_guard(spawn: Spawn, mark: child_guard.ProcessMark) -> None:
    name, _, value = mark.variable.partition("=")
    child = spawn(env=os.environ | {name: value})
    process = _start_guard(mark)
    process.communicate(b"remove /nowhere\ndone\n", timeout=5)
    assert child.poll() is None
    assert mark.folder is not None and Path(mark.folder).exists()


@pytest.mark.parametrize("folder", ["", ".", "ray", "/", "//", "/tmp/.."])
def test_a_folder_that_marks_other_processes_is_refused(folder: str) -> None:
    with pytest.raises(ValueError, match="marks no process"):
        child_guard.ProcessMark("HEADRACE_SERVE_ID=x", folder)


@pytest.mark.parametrize("variable", ["", "HEADRACE_SERVE_ID", "HEADRACE_SERVE_ID=", "=x"])
def test_a_variable_that_marks_other_processes_is_refused(variable: str) -> None:
    with pytest.raises(ValueError, match="marks no process"):
        child_guard.ProcessMark(variable)


def test_without_a_folder_open_files_mark_no_process(spawn: Spawn, tmp_path: Path) -> None:
    child = spawn(f"log = open({str(tmp_path / 'log')!r}, 'w'); {_SLEEP}")
    assert not child_guard.ProcessMark("HEADRACE_SERVE_ID=x").matches(child.pid)


def test_a_forced_stop_without_a_folder_kills_only_what_inherits_the_mark(
    spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal function only records: a wrong mark would kill unrelated processes of the same user."""
    monkeypatch.setenv(SERVE_ID_VARIABLE, "")  # restored at the end
    cleanup = Cleanup()
    spawn(f"log = open({str(tmp_path / 'log')!r}, 'w'); {_SLEEP}", env={})  # as a process of a Ray of others
    own = spawn()
    signalled = set()

    def record(pid: int, number: int) -> None:
        signalled.add(pid)
        if pid == own.pid:
            own.kill()

    kill = os.kill
    monkeypatch.setattr(own, "send_signal", lambda number: kill(own.pid, number))
    monkeypatch.setattr(os, "kill", record)
    cleanup.force()
    monkeypatch.undo()
    assert signalled == {own.pid}

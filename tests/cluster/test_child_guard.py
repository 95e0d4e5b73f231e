"""The child-process guard kills processes with its mark, and no others."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from headrace_cluster.local.child_guard import SERVE_ID_VARIABLE, ChildGuard

_SLEEP = "import time; print(flush=True); time.sleep(60)"

Spawn = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def spawn() -> Iterator[Spawn]:
    children: list[subprocess.Popen[bytes]] = []

    def start(code: str = _SLEEP, **environment: str) -> "subprocess.Popen[bytes]":
        command, environ = [sys.executable, "-S", "-c", code], os.environ | environment
        child = subprocess.Popen(command, stdout=subprocess.PIPE, env=environ)
        children.append(child)
        assert child.stdout is not None
        child.stdout.readline()
        return child

    yield start
    for child in children:
        child.kill()
        child.wait()


def test_everything_of_a_serve_ends_with_it(spawn: Spawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SERVE_ID_VARIABLE, "")  # restored at the end
    ray, run, state_file = tmp_path / "ray", tmp_path / "run", tmp_path / "serve-1.json"
    logs = ray / "session_2026-11-22" / "logs"
    logs.mkdir(parents=True)
    run.mkdir()
    (logs / "raylet.out").write_text("of Ray")
    state_file.write_text(json.dumps({"log_folder": str(run)}))
    before = spawn()
    with ChildGuard(ray, state_file):
        by_environment = spawn()
        other_value = spawn(**{SERVE_ID_VARIABLE: os.environ[SERVE_ID_VARIABLE] + "0"})
        other = {SERVE_ID_VARIABLE: "another"}
        by_file = spawn(f"log = open({str(ray / 'log')!r}, 'w'); {_SLEEP}", **other)
        other_folder = spawn(f"log = open({str(tmp_path / 'ray-log')!r}, 'w'); {_SLEEP}", **other)
        time.sleep(0.2)
        assert by_environment.poll() is None
    assert by_environment.wait(1) == by_file.wait(1) == -9
    assert before.poll() is other_value.poll() is other_folder.poll() is None
    assert not ray.exists() and not state_file.exists()
    assert (run / "ray" / "raylet.out").stat().st_mode & 0o777 == 0o600

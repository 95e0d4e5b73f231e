"""Folders of runs: which are kept, and their permissions."""

import os
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from headrace_cluster.errors import StateError
from headrace_cluster.local import state
from headrace_cluster.local.processes import ProcessId
from headrace_cluster.local.run_logs import SERVER_FILE, in_use, logs_home, make_run_folder, runs

BEGIN = datetime(2026, 11, 22, 2, 0, tzinfo=UTC)


def _run(number: int, port: int = 8002) -> Path:
    return make_run_folder("headrace", port, BEGIN + timedelta(minutes=number))


def test_the_last_five_runs_of_a_server_and_those_in_use_are_kept() -> None:
    other, alive = _run(0, port=9000), _run(0)
    me = ProcessId.of(os.getpid())
    assert me is not None
    state.save(state.ServeState(me.pid, me.started, "headrace", "", "", 8002), alive / SERVER_FILE)
    for number in range(1, 8):
        folder = _run(number)
        (folder / "serve.log").write_text("x")
    assert in_use(alive) and not in_use(folder)
    names = [run.name for run in runs("headrace-8002")]
    assert names == [alive.name, *(f"headrace-8002-20261122T02{number:02}00Z" for number in range(3, 8))]
    assert other in runs() and len(runs()) == 7
    assert logs_home().stat().st_mode & 0o777 == folder.stat().st_mode & 0o777 == 0o700


def test_an_unusable_home_is_one_sentence() -> None:
    logs_home().write_text("")
    with pytest.raises(StateError, match=r"cannot be made.*HEADRACE_HOME"):
        _run(0)

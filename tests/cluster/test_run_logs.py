"""Folders of runs: which are kept, their permissions, and Ray's logs in them."""

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from headrace_cluster.errors import StateError
from headrace_cluster.local import child_guard
from headrace_cluster.local.run_logs import RunFolder, in_use, link_ray_logs, logs_home, rank_log_path, runs

BEGIN = datetime(2026, 11, 22, 2, 0, tzinfo=UTC)


def _run(number: int, port: int = 8002) -> RunFolder:
    return RunFolder("headrace", port, BEGIN + timedelta(minutes=number))


def test_the_last_five_runs_of_a_server_are_kept() -> None:
    other = _run(0, port=9000)
    other.close()
    for number in range(7):
        folder = _run(number)
        (folder.path / "serve.log").write_text("x")
        folder.close()
    names = [run.name for run in runs("headrace-8002")]
    assert names == [f"headrace-8002-20261122T02{number:02}00Z" for number in range(2, 7)]
    assert other.path in runs() and len(runs()) == 6
    assert logs_home().stat().st_mode & 0o777 == folder.path.stat().st_mode & 0o777 == 0o700


def test_a_run_in_use_is_not_removed() -> None:
    alive = _run(0)
    for number in range(1, 8):
        _run(number).close()
    assert in_use(alive.path) and alive.path.is_dir() and len(runs()) == 6
    alive.close()
    alive.close()
    assert not in_use(alive.path)


def test_two_in_one_second_have_folders_of_their_own() -> None:
    first, second = _run(0), _run(0)
    assert first.path != second.path and runs() == [first.path, second.path]


def test_an_unusable_home_is_one_sentence() -> None:
    logs_home().write_text("")
    with pytest.raises(StateError, match=r"cannot be made.*HEADRACE_HOME"):
        _run(0)


def test_rays_logs_are_linked_then_moved(tmp_path: Path) -> None:
    run = _run(0).path
    logs = tmp_path / "session_2026-11-22" / "logs"
    logs.mkdir(parents=True)
    (logs / "raylet.out").write_text("of Ray")
    link_ray_logs(run, tmp_path)
    assert (run / "ray" / "raylet.out").read_text() == "of Ray"
    child_guard.keep_logs(str(tmp_path), str(run / "ray"))
    assert not logs.exists() and not (run / "ray").is_symlink()
    assert (run / "ray" / "raylet.out").stat().st_mode & 0o777 == 0o600
    child_guard.keep_logs(str(tmp_path), str(run / "ray"))  # there is nothing to move
    assert (run / "ray" / "raylet.out").read_text() == "of Ray"


def test_a_rank_has_one_file_for_all_generations() -> None:
    assert rank_log_path(Path("/run"), "m-0", 2) == Path("/run/m-0-rank2.log")

"""`headrace logs`: the choice of run and files, their order, and --follow."""

import os
import signal
import subprocess
import sys
import threading
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from headrace_base.logs import LogFile
from headrace_cluster.cli.logs import find_run, print_logs
from headrace_cluster.cli.servers import ServerChoice
from headrace_cluster.errors import NotRunningError, ServerChoiceError
from headrace_cluster.local import state
from headrace_cluster.local.processes import ProcessId
from headrace_cluster.local.run_logs import SERVER_FILE, make_run_folder
from headrace_cluster.local.state import ServeState


def _line(second: float, text: str) -> str:
    return f"2026-11-22 02:00:{second:06.3f} part       {text}\n"


@pytest.fixture
def run() -> Path:
    """A run in use."""
    folder = make_run_folder("headrace", 8002)
    (folder / "serve.log").write_text(_line(1, "first") + _line(5, "fifth"))
    (folder / "router-1.log").write_text(_line(2, "second"))
    (folder / "router-2.log").write_text(_line(3, "third") + "Traceback\n  of the third\n")
    (folder / "m-0-rank0.log").write_text(_line(4, "fourth"))
    (folder / "m-10-rank0.log").write_text(_line(6, "sixth"))
    state.save(_server(8002, folder, os.getpid()), folder / SERVER_FILE)
    return folder


def _server(port: int, folder: Path, pid: int) -> ServeState:
    process = ProcessId.of(pid)
    assert process is not None
    url = f"http://127.0.0.1:{port}"
    return ServeState(process.pid, process.started, "headrace", url, "", port, log_folder=str(folder))


def test_all_files_are_merged_by_time(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_logs(run, None, 100, follow=False)
    out = capsys.readouterr().out
    words = [line.split()[-1] for line in out.splitlines() if line.startswith("2026")]
    assert words == ["first", "second", "third", "fourth", "fifth", "sixth"]
    assert "third\nTraceback\n  of the third\n2026" in out, "a traceback stays with its line"


@pytest.mark.parametrize(
    ("part", "lines", "expected"),
    [
        ("router", 100, ["second", "third"]),
        ("router-2", 100, ["third"]),
        ("m-0", 100, ["fourth"]),
        ("serve", 1, ["fifth"]),
        (None, 0, []),
    ],
)
def test_one_part_and_the_last_lines(
    run: Path, capsys: pytest.CaptureFixture[str], part: str | None, lines: int, expected: list[str]
) -> None:
    print_logs(run, part, lines, follow=False)
    out = capsys.readouterr().out
    assert [line.split()[-1] for line in out.splitlines() if line.startswith("2026")] == expected


def test_json_records_are_ordered_by_their_time(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "serve.log").write_text('{"timestamp": "2026-11-22T02:00:09", "event": "b"}\n')
    (run / "a.log").write_text('{"timestamp": "2026-11-22T02:00:07", "event": "a"}\n')
    print_logs(run, None, 2, follow=False)
    assert [line[-4:-2] for line in capsys.readouterr().out.splitlines()] == ['"a', '"b']


def test_a_part_without_a_file_is_a_sentence(run: Path) -> None:
    with pytest.raises(NotRunningError, match="no log of 'm-7'; it has: m-0, m-10, router, serve"):
        print_logs(run, "m-7", 1, follow=False)


def _at(admin_port: int) -> ServerChoice:
    return ServerChoice(admin_port=admin_port, given=f"admin port {admin_port}")


def test_the_running_server_else_the_last_run(run: Path) -> None:
    with pytest.raises(NotRunningError, match="there are no logs of a server with admin port 9000"):
        find_run(_at(9000))
    assert find_run(ServerChoice()) == find_run(_at(8002)) == run
    later = make_run_folder("headrace", 9000, datetime.now(UTC) + timedelta(seconds=1))
    assert find_run(ServerChoice()) == later and find_run(_at(8002)) == run
    state.save(_server(8002, run, os.getpid()))
    assert find_run(ServerChoice()) == run, "a running server is preferred to a later run that ended"
    state.save(_server(9000, later, os.getppid()))
    with pytest.raises(ServerChoiceError, match="2 servers run"):
        find_run(ServerChoice())


def _ended(base: int, minute: int, model: str, cluster: str = "headrace") -> Path:
    """A run that ended: HTTP at `base`, gRPC at base + 1, admin at base + 2."""
    run = make_run_folder(cluster, base + 2, datetime(2026, 11, 22, 2, minute, tzinfo=UTC))
    url, admin, grpc = f"http://127.0.0.1:{base}", f"http://127.0.0.1:{base + 2}", f"127.0.0.1:{base + 1}"
    server = ServeState(1, 1, cluster, admin, "", base + 2, url, grpc, (model,), control_address="127.0.0.1:5")
    state.save(server, run / SERVER_FILE)
    (run / f"{model}-0-rank0.log").write_text(_line(1, model))
    return run


def test_any_port_or_name_finds_a_run_that_ended() -> None:
    tiny, blue = _ended(9000, 0, "tiny"), _ended(9100, 1, "smollm2", "blue")
    for port in (9000, 9001, 9002):
        assert find_run(ServerChoice(port=port, given=f"--port {port}")) == tiny
    for name in ("tiny", "headrace", "9001"):
        assert find_run(ServerChoice(names=(name,), given=name)) == tiny
    assert find_run(ServerChoice(port=5, given="--port 5")) == blue, "the newest run that matches"
    assert find_run(_at(9102)) == find_run(ServerChoice(names=("blue", "smollm2"), given="both")) == blue


def test_follow_prints_new_lines_and_files(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    follower = threading.Thread(target=print_logs, args=(run, "m-0", 100), kwargs={"follow": True})
    follower.start()
    file = LogFile(run / "m-0-rank0.log", max_bytes=120)
    for number in range(6):
        file.write(_line(10 + number, f"line{number}"))
        time.sleep(0.3)
    LogFile(run / "m-0-rank1.log").write(_line(20, "rank1"))
    time.sleep(0.3)
    (run / SERVER_FILE).unlink()  # as after the end of its process
    follower.join(10)
    out, err = capsys.readouterr()
    assert [line.split()[-1] for line in out.splitlines()] == [
        "fourth",
        *(f"line{number}" for number in range(6)),
        "rank1",
    ]
    assert "the server has ended" in err


def test_ctrl_c_ends_follow_with_status_0(run: Path) -> None:
    command = [sys.executable, "-m", "headrace_cluster", "logs", "serve", "-f", "--admin-port", "8002"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None and "first" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=20)
    assert (process.returncode, err) == (0, "")

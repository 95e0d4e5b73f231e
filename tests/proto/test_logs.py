"""Log lines as text and as JSON, the log file of a process, and output of native code."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace_proto.log_file import LogFile, previous
from headrace_proto.log_line import json_line, text_line
from headrace_proto.logs import LogConfig, StderrSink

RECORD: dict[str, Any] = {
    "timestamp": 1_800_000_000.25,
    "level": "warning",
    "part": "router",
    "replica": "m-0",
    "event": "stream lost",
    "reason": "closed",
}


def test_a_line_has_time_part_replica_sentence_and_facts() -> None:
    line = text_line(RECORD, date=False)
    assert line[8:] == " router     warning: m-0: stream lost (reason=closed)\n" and line[2] == line[5] == ":"
    assert text_line(RECORD).startswith("2027-01-1")
    assert text_line(RECORD | {"event": "rank 0 of m-0 was killed"}).count("m-0") == 1


def test_a_traceback_follows_its_line() -> None:
    assert text_line(RECORD | {"exception": "Traceback ...\nValueError"}).endswith(
        "closed)\nTraceback ...\nValueError\n"
    )


def test_a_narrow_terminal_breaks_lines_below_the_sentence() -> None:
    path = "/very/long/path/" + "x" * 80
    lines = text_line(RECORD | {"event": f"word {'and more ' * 12}{path}"}, date=False, width=80).splitlines()
    assert len(lines) > 2 and all(len(line) <= 80 or path in line for line in lines)
    assert all(line.startswith(" " * 20) and line[20] != " " for line in lines[1:])
    assert any(path in line for line in lines), "a path stays whole"


def test_colour_marks_time_part_and_level() -> None:
    line = text_line(RECORD, colour=True)
    assert "\x1b[33mm-0: stream lost" in line and "warning" not in line
    assert "\x1b" not in text_line(RECORD)


def test_json_is_one_object_a_line() -> None:
    line = json_line(RECORD | {"exception": "Traceback\n...", "path": Path("/x")})
    assert line.count("\n") == 1
    found = json.loads(line)
    assert list(found)[:2] == ["timestamp", "level"] and found["timestamp"] == "2027-01-15T08:00:00.250+00:00"
    assert (found["part"], found["replica"], found["event"], found["reason"]) == (
        "router",
        "m-0",
        "stream lost",
        "closed",
    )


def test_stderr_gets_no_traceback_where_a_file_has_it() -> None:
    stream = io.StringIO()
    StderrSink(LogConfig("router", path="/logs/router.log"), stream).write(RECORD | {"exception": "Traceback"}, 30)
    assert stream.getvalue().endswith("traceback=/logs/router.log)\n") and "Traceback" not in stream.getvalue()
    quiet = io.StringIO()
    StderrSink(LogConfig("router", stderr_level="error"), quiet).write(RECORD, 30)
    assert quiet.getvalue() == ""


@pytest.mark.parametrize(("variable", "coloured"), [("", True), ("NO_COLOR", False)])
def test_colour_only_on_a_terminal(variable: str, coloured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    import os
    import pty

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    if variable:
        monkeypatch.setenv(variable, "1")
    ours, theirs = pty.openpty()
    with os.fdopen(theirs, "w") as terminal:
        StderrSink(LogConfig("serve"), terminal).write(RECORD, 30)
        assert (b"\x1b[" in os.read(ours, 1000)) is coloured
    os.close(ours)


def test_a_full_file_is_rotated(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    file = LogFile(path, max_bytes=100)
    for number in range(10):
        file.write(f"{number} {'x' * 37}\n")
    kept = previous(path).read_text() + path.read_text()
    assert kept.splitlines()[-1].startswith("9 ") and 2 <= len(kept.splitlines()) <= 4
    assert {entry.name for entry in tmp_path.iterdir()} == {"serve.log", "serve.log.1"}
    assert [entry.stat().st_mode & 0o777 for entry in tmp_path.iterdir()] == [0o600, 0o600]
    LogFile(path).write("again\n")
    assert path.read_text().splitlines()[1:] == [f"9 {'x' * 37}", "again"], "the next process appends"


def test_a_rotation_that_failed_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "serve.log"
    file = LogFile(path, max_bytes=100)
    file.write("first\n" * 16)

    def refuse(*_: object) -> int:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patch:
        patch.setattr("headrace_proto.log_file.os.open", refuse)
        file.write("lost\n")
    assert not path.exists()
    file.write("second\n")
    assert path.read_text() == "second\n" and previous(path).read_text() == "first\n" * 16
    path.unlink()
    file.write("x" * 100)
    assert path.read_text() == "x" * 100, "a file that was removed"


PROGRAM = """
import os, sys, threading, logging, structlog
from headrace_proto.logs import LogConfig, configure_logs
configure_logs(LogConfig("rank 0", "m-0", sys.argv[1], sys.argv[2], stderr_level="warning"))
log = structlog.get_logger()
log.info("quiet")
log.warning("loud", blocks=3)
logging.getLogger("library").error("of a library")
os.write(2, b"native\\n")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise KeyError("end")
"""


@pytest.mark.parametrize("form", ["text", "json"])
def test_a_process_logs_to_its_file_and_the_rest_to_stderr(tmp_path: Path, form: str) -> None:
    path = tmp_path / "run" / "m-0-rank0.log"
    done = subprocess.run([sys.executable, "-c", PROGRAM, path, form], capture_output=True, text=True, check=False)
    written = path.read_text()
    for words in ("quiet", "loud", "of a library", "native", "ZeroDivisionError", "KeyError"):
        assert words in written, words
    assert path.parent.stat().st_mode & 0o777 == 0o700
    lines = done.stderr.splitlines()
    assert len(lines) == 4 and "Traceback" not in done.stderr and "native" not in done.stderr
    if form == "json":
        assert [json.loads(line)["level"] for line in lines] == ["warning", "error", "error", "error"]
        assert json.loads(lines[0])["blocks"] == 3
    else:
        assert lines[0].endswith(" rank 0     warning: m-0: loud (blocks=3)") and str(path) in lines[3]


SIGNALLED = """
import signal, sys, structlog
from headrace_proto.logs import LogConfig, configure_logs
configure_logs(LogConfig("serve", path=sys.argv[1]))
log = structlog.get_logger()
left = 2000
def handle(number, frame):
    global left
    left -= 1
    log.info("handled")
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
while left > 0:
    log.info("line " + "x" * 500)
signal.setitimer(signal.ITIMER_REAL, 0)
log.info("end")
"""


def test_a_signal_handler_may_log_while_a_line_is_written(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SIGNALLED, str(tmp_path / "serve.log")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0 and done.stderr.endswith(" end\n"), done.stderr[-2000:]
    assert done.stderr.count("handled") >= 2000


def test_a_folder_that_cannot_be_made_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    program = PROGRAM.partition("log.info")[0]
    path = tmp_path / "file" / "x.log"
    done = subprocess.run([sys.executable, "-c", program, path, "text"], capture_output=True, text=True, check=True)
    assert "cannot be opened: File exists" in done.stderr

"""Log lines as text and as JSON, the log file of a process, output of native code, and a closed terminal."""

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace_base.logs import LogFile, json_line, previous, text_line

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


PROGRAM = """
import os, sys, threading, logging, structlog
from headrace_base.logs import LogConfig, configure_logs
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
from headrace_base.logs import LogConfig, configure_logs
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


IN_A_TERMINAL = """
import sys, time
import structlog
from headrace_base.logs import LogConfig, configure_logs
configure_logs(LogConfig("test"))
structlog.get_logger().info("one ünd")
time.sleep(float(sys.argv[1]))
structlog.get_logger().info("two")
open(sys.argv[2], "w").write("done")
"""


def test_a_closed_terminal(tmp_path: Path) -> None:
    primary, secondary = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", IN_A_TERMINAL, "0.5", str(tmp_path / "end")], stderr=secondary)
    os.close(secondary)
    assert "one ünd".encode() in os.read(primary, 100)
    os.close(primary)
    assert process.wait(30) == 0
    assert (tmp_path / "end").read_text() == "done"

"""A process does not fail when the terminal of its stderr is closed."""

import os
import pty
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys, time
import structlog
from headrace_proto.logs import LogConfig, configure_logs
configure_logs(LogConfig("test"))
structlog.get_logger().info("one ünd")
time.sleep(float(sys.argv[1]))
structlog.get_logger().info("two")
open(sys.argv[2], "w").write("done")
"""


def test_a_closed_terminal(tmp_path: Path) -> None:
    primary, secondary = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, "0.5", str(tmp_path / "end")], stderr=secondary)
    os.close(secondary)
    assert "one ünd".encode() in os.read(primary, 100)
    os.close(primary)
    assert process.wait(30) == 0
    assert (tmp_path / "end").read_text() == "done"

"""`headrace chat` in a pseudo-terminal: keys in, screen output out."""

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

PASTE = "\x1b[200~{}\x1b[201~"
UP, CTRL_C, CTRL_D, ALT_ENTER = "\x1b[A", "\x03", "\x04", "\x1b\r"
_ESCAPES = re.compile(r"\x1b(?:\[([0-9]+)C|\[[0-9;?]*[A-Za-z]|[=>])")  # group 1: the cursor moves right


class ChatTerminal:
    """80 columns and 24 lines."""

    def __init__(self, home: Path, port: int, *arguments: str, **environment: str) -> None:
        self._master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        command = [sys.executable, "-m", "headrace_cluster", "chat", "--port", str(port), *arguments]
        environ = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        environ |= {"HEADRACE_HOME": str(home), "TERM": "xterm-256color"} | environment
        self.modes = termios.tcgetattr(slave)
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environ, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )  # fmt: skip
        self._slave = slave
        self.received = ""
        self._read_to = 0

    def type(self, keys: str) -> None:
        data = keys.encode()
        while data:
            data = data[os.write(self._master, data[:512]) :]
            self._receive(0)

    def wait_for(self, text: str, seconds: float = 60) -> str:
        """The output without escape sequences, from the last match up to and including this text."""
        deadline = time.monotonic() + seconds
        while True:
            plain = self.plain
            found = plain.find(text, self._read_to)
            if found >= 0:
                begin, self._read_to = self._read_to, found + len(text)
                return plain[begin : self._read_to]
            assert time.monotonic() < deadline, f"no {text!r} in {plain[self._read_to :]!r}"
            self._receive(0.1)

    def wait_until(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"not in time: {self.plain[self._read_to :]!r}"
            self._receive(0.05)

    @property
    def plain(self) -> str:
        return _ESCAPES.sub(lambda found: " " * int(found[1]) if found[1] else "", self.received)

    @property
    def modes_now(self) -> list[object]:
        return termios.tcgetattr(self._slave)

    def wait_end(self, seconds: float = 30) -> int:
        """The exit status."""
        deadline = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < deadline, f"still running: {self.plain[self._read_to :]!r}"
            self._receive(0.05)
        self._receive(0)
        return self.process.returncode

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
        os.close(self._master)
        os.close(self._slave)

    def _receive(self, seconds: float) -> None:
        while select.select([self._master], [], [], seconds)[0]:
            data = os.read(self._master, 65536).decode("utf-8", "replace")
            self.received += data
            seconds = 0

"""`headrace chat` in a pseudo-terminal: keys in, screen output out."""

import os
import pty
import re
import select
import subprocess
import sys
import termios
import time
from pathlib import Path

PASTE = "\x1b[200~{}\x1b[201~"
UP, CTRL_C, CTRL_D, ESC_ENTER = "\x1b[A", "\x03", "\x04", "\x1b\r"
_ESCAPES = re.compile(r"\x1b(?:\[([0-9]+)C|\[[0-9;?]*[A-Za-z]|[=>])")  # group 1: the cursor moves right


class ChatTerminal:
    """80 columns and 24 lines."""

    def __init__(self, home: Path, port: int, **environment: str) -> None:
        self._master, self._slave = pty.openpty()
        termios.tcsetwinsize(self._slave, (24, 80))
        command = [sys.executable, "-m", "headrace_cluster", "chat", "--port", str(port)]
        environ = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
        # This terminal does not answer a request for the cursor's position (CPR).
        environ |= {"HEADRACE_HOME": str(home), "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1"} | environment
        self._modes = termios.tcgetattr(self._slave)
        self.process = subprocess.Popen(
            ["setsid", "--ctty", *command], stdin=self._slave, stdout=self._slave, stderr=self._slave, env=environ
        )
        self.received = ""
        self._read_to = 0

    @property
    def plain(self) -> str:
        """The output without escape sequences."""
        return _ESCAPES.sub(lambda found: " " * int(found[1]) if found[1] else "", self.received)

    def type(self, keys: str, *replies: str) -> None:
        """Types keys and waits for the replies, one after the other."""
        data = keys.encode()
        while data:
            data = data[os.write(self._master, data[:512]) :]
            self._receive(0)
        for text in replies:
            self.wait_for(text)

    def wait_for(self, text: str) -> None:
        """Waits until the text is in the output, after the text of the last wait."""
        deadline = time.monotonic() + 30
        while (found := self.plain.find(text, self._read_to)) < 0:
            assert time.monotonic() < deadline, f"no {text!r} in {self.plain[self._read_to :]!r}"
            self._receive(0.1)
        self._read_to = found + len(text)

    def wait_end(self) -> int:
        """The exit status. The terminal's modes are as before."""
        status = self.process.wait(30)
        assert termios.tcgetattr(self._slave) == self._modes
        return status

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)
        os.close(self._slave)

    def _receive(self, seconds: float) -> None:
        while select.select([self._master], [], [], seconds)[0]:
            self.received += os.read(self._master, 65536).decode("utf-8", "replace")
            seconds = 0

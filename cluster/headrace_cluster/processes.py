"""Processes of this machine, Linux ways: identity that survives a reused pid, and dying with a parent."""

import contextlib
import ctypes
import os
import signal
from dataclasses import dataclass
from pathlib import Path

# Every process that descends from a serve inherits this variable, and nothing else has its value: see reaper.py.
SERVE_ID_VARIABLE = "HEADRACE_SERVE_ID"

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A pid with its start time (clock ticks since boot): together they name one process for good."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> "ProcessId | None":
        """The process that has this pid now; None when there is none, or it is a zombie."""
        try:
            # The second field is the command in brackets and may hold anything, brackets included.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] == "Z" else cls(pid, int(fields[19]))

    @property
    def alive(self) -> bool:
        return ProcessId.of(self.pid) == self

    def signal(self, number: int) -> bool:
        """Sends a signal; False when the process is gone."""
        if not self.alive:
            return False
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)
            return True
        return False


def die_with_parent(parent: int, number: int = signal.SIGTERM) -> None:
    """Asks the kernel to send this process a signal when its parent's thread ends; exits if that happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)

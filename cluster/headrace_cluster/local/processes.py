"""Processes of this machine, on Linux: an identity that a reused pid does not match, and parent-death signals."""

import contextlib
import ctypes
import os
import signal
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True, slots=True)
class ProcessId:
    """A pid with its start time (clock ticks since boot): together they identify one process permanently."""

    pid: int
    started: int

    @classmethod
    def of(cls, pid: int) -> "ProcessId | None":
        """The process that has this pid now; None when there is none, or it is a zombie."""
        try:
            # psutil's start time depends on adjustments of the clock: docs/decisions/0012. The second field is the
            # command in brackets; it may contain any characters, brackets included.
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return None
        return None if fields[0] == "Z" else cls(pid, int(fields[19]))

    @property
    def alive(self) -> bool:
        return ProcessId.of(self.pid) == self

    def signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def set_parent_death_signal(parent: int, number: int = signal.SIGTERM) -> None:
    """Has the kernel signal this process when its parent's thread ends; exits if it has ended already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)

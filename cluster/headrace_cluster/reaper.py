"""Ends what a killed `serve` left behind.

Ray's agents outlive their raylet by half a minute when the driver is killed with SIGKILL. The reaper is a small process
in a session of its own that waits for its standard input to end: `serve` holds the other end, says "remove PATH" for
files that must not outlive it, and "done" after an orderly stop. Without that word the reaper kills every process that
bears the serve's mark and removes the files.

Standard library only, and run as a file: it starts in hundredths of a second and holds little memory.
"""

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

PATIENCE_SECONDS = 9.0


@dataclass(frozen=True)
class Mark:
    """How to tell the processes of one serve: by a variable in their environment, or by a file that they have open.

    Ray's processes write their titles over their environment, but all of them log into Ray's folder.
    """

    variable: str  # NAME=VALUE
    folder: str

    def on(self, pid: int) -> bool:
        """Whether that process bears the mark; False when it is gone, or somebody else's."""
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if self.variable.encode() in file.read().split(b"\0"):
                    return True
            return any(link.startswith(self.folder + "/") for link in _open_files(pid))
        except OSError:
            return False


def _open_files(pid: int) -> Iterator[str]:
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            yield os.readlink(f"/proc/{pid}/fd/{descriptor}")


def kill_marked(mark: Mark, spare: Collection[int] = (), patience: float = PATIENCE_SECONDS) -> None:
    """Kills marked processes until a look finds none: what they start meanwhile bears the mark too."""
    deadline = time.monotonic() + patience
    while time.monotonic() < deadline:
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
        left = [pid for pid in pids if pid != os.getpid() and pid not in spare and mark.on(pid)]
        if not left:
            return
        for pid in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def remove(path: str) -> None:
    """Removes a file or a folder, if it is there."""
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        os.unlink(path)


def main(arguments: list[str]) -> int:
    """usage: reaper.py NAME=VALUE FOLDER (the variable and the folder that mark processes; the folder is removed)"""
    variable, folder = arguments
    paths = [folder]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for line in sys.stdin:
        word, _, path = line.rstrip("\n").partition(" ")
        if word == "done":
            return 0
        paths.append(path)  # word: remove
    kill_marked(Mark(variable, folder))
    for path in paths:
        remove(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

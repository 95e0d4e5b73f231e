"""Ends the processes that a killed `serve` left running.

Ray's agents run half a minute longer than their raylet when the driver is killed with SIGKILL. The child-process guard
is a small process in a session of its own that waits until its standard input ends. `serve` has the other end of that
pipe and writes "remove PATH" for files that must not outlive it, "keep PATH" for the destination of Ray's logs, and
"done" after an orderly stop. Without "done" the guard kills every process with the serve's mark, moves the logs and
removes the files.

Standard library only, and run as a file: it starts in hundredths of a second and holds little memory.
"""

import contextlib
import glob
import os
import shutil
import signal
import sys
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

KILL_SECONDS = 9.0


@dataclass(frozen=True)
class ProcessMark:
    """Identifies the processes of one serve: by a variable in their environment, or by an open file in a folder.

    Ray's processes overwrite their environment with their titles, but all of them log into Ray's folder.
    """

    variable: str  # NAME=VALUE
    folder: str | None = None  # absolute; None: by the variable only

    def __post_init__(self) -> None:
        """Raises ValueError for a mark that other processes have, too: whatever has it is killed."""
        name, _, value = self.variable.partition("=")
        if not name or not value:
            raise ValueError(f"{self.variable!r} marks no process: it must be NAME=VALUE")
        if self.folder is not None and (not os.path.isabs(self.folder) or os.path.normpath(self.folder) in ("/", "//")):
            raise ValueError(f"{self.folder!r} marks no process: it must be an absolute path below the root")

    def matches(self, pid: int) -> bool:
        """Whether that process has the mark; False when it has ended, or belongs to another user."""
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                if self.variable.encode() in file.read().split(b"\0"):
                    return True
            return self.folder is not None and any(link.startswith(self.folder + "/") for link in _open_files(pid))
        except OSError:
            return False


def _open_files(pid: int) -> Iterator[str]:
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            yield os.readlink(f"/proc/{pid}/fd/{descriptor}")


def kill_marked(mark: ProcessMark, exclude: Collection[int] = (), seconds: float = KILL_SECONDS) -> None:
    """Kills marked processes until a scan finds none: processes that they start meanwhile have the mark, too."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
        found = [pid for pid in pids if pid != os.getpid() and pid not in exclude and mark.matches(pid)]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def remove(path: str) -> None:
    """Removes a file or a folder, if it is there."""
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        os.unlink(path)


def keep_logs(temp_dir: str, destination: str) -> None:
    """Moves the logs of the Ray in `temp_dir` to `destination`, readable by the owner only; replaces a link there."""
    found = sorted(glob.glob(os.path.join(glob.escape(temp_dir), "session_2*", "logs")))
    if not found:
        return
    with contextlib.suppress(OSError, shutil.Error):  # a full disk: the files that were copied stay
        if os.path.islink(destination):
            os.unlink(destination)
        shutil.move(found[-1], destination)
    for folder, _, files in os.walk(destination):
        os.chmod(folder, 0o700)
        for name in files:
            with contextlib.suppress(OSError):  # a dangling link
                os.chmod(os.path.join(folder, name), 0o600)


def main(arguments: list[str]) -> int:
    """usage: child_guard.py NAME=VALUE FOLDER (the variable and folder that mark processes; the folder is removed)"""
    variable, folder = arguments
    paths = [folder]
    logs = ""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for line in sys.stdin:
        command, _, path = line.rstrip("\n").partition(" ")
        if command == "done":
            return 0
        if command == "keep":
            logs = path
        else:  # remove
            paths.append(path)
    kill_marked(ProcessMark(variable, folder))
    if logs:
        keep_logs(folder, logs)
    for path in paths:
        remove(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

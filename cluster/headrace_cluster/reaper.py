"""Ends what a killed `serve` left behind.

Ray's agents outlive their raylet by half a minute when the driver is killed with SIGKILL. The reaper is a small process
in a session of its own that waits for its standard input to end: `serve` holds the other end and says "done" after
an orderly stop. Without that word it kills every process that carries the serve's id in its environment, and removes
the files named on its command line.

Standard library only, and run as a file: it starts in hundredths of a second and holds little memory.
"""

import os
import shutil
import signal
import sys
import time
from collections.abc import Collection

PATIENCE_SECONDS = 9.0


def marked(marker: bytes, spare: Collection[int] = ()) -> list[int]:
    """Processes, but for this one and those to spare, whose environment holds the marker and can be read by us."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid() or int(entry) in spare:
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                environment = file.read()
        except OSError:
            continue
        if marker in environment.split(b"\0"):
            found.append(int(entry))
    return found


def kill_marked(marker: bytes, spare: Collection[int] = (), patience: float = PATIENCE_SECONDS) -> None:
    """Kills marked processes until a look finds none: what they start meanwhile carries the marker too."""
    deadline = time.monotonic() + patience
    while (left := marked(marker, spare)) and time.monotonic() < deadline:
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                continue
        time.sleep(0.1)


def remove(path: str) -> None:
    """Removes a file or a folder, if it is there."""
    if os.path.isdir(path):
        shutil.rmtree(path, ignore_errors=True)
    elif os.path.lexists(path):
        os.unlink(path)


def main(arguments: list[str]) -> int:
    """usage: reaper.py MARKER PATH... (MARKER is NAME=VALUE as in an environment)"""
    marker, *paths = arguments
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if sys.stdin.readline().strip() == "done":
        return 0
    kill_marked(marker.encode())
    for path in paths:
        remove(path)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

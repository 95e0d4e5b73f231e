"""Ends what a `serve` started on this machine and removes its private files, however that process ends.

Ray's agents run half a minute longer than their raylet when the driver is killed with SIGKILL. The child-process guard
is a small process in a session of its own that waits until its standard input ends, of which `serve` has the other
end. Then it kills every process with the serve's mark, moves Ray's logs and removes the files.

A process has the mark if it inherited a variable in its environment, or if it has an open file in Ray's folder: Ray's
processes overwrite their environment with their titles, but all of them log there.

Standard library only, and run as a file: it starts in hundredths of a second and holds little memory.
"""

import contextlib
import glob
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

SERVE_ID_VARIABLE = "HEADRACE_SERVE_ID"
KILL_SECONDS = 9.0


class ChildGuard:
    """The guard of this process; every process that is started from now on has the mark. Its end ends all of them."""

    def __init__(self, ray_folder: Path, state_file: Path) -> None:
        """Both are removed at the end. state_file: has the log folder, to which Ray's logs are moved."""
        serve_id = os.environ[SERVE_ID_VARIABLE] = secrets.token_hex()
        command = [sys.executable, "-I", "-S", __file__, serve_id, str(ray_folder), str(state_file)]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
        )

    def __enter__(self) -> "ChildGuard":
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(2 * KILL_SECONDS)


def is_marked(pid: int, serve_id: str, folder: str) -> bool:
    """Whether that process is one of the serve; False when it has ended, or belongs to another user."""
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        variable = f"{SERVE_ID_VARIABLE}={serve_id}".encode()
        return variable in environment or any(link.startswith(f"{folder}/") for link in _open_files(pid))
    except OSError:
        return False


def _open_files(pid: int) -> Iterator[str]:
    for descriptor in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            yield os.readlink(f"/proc/{pid}/fd/{descriptor}")


def kill_marked(serve_id: str, folder: str, exclude: Collection[int]) -> None:
    """Kills marked processes until a scan finds none: processes that they start meanwhile have the mark, too."""
    assert serve_id and len(Path(folder).parts) > 2, "an empty mark would be that of unrelated processes"
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        pids = [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]
        found = [pid for pid in pids if pid not in exclude and is_marked(pid, serve_id, folder)]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def keep_logs(ray_folder: str, destination: str) -> None:
    """Moves Ray's logs to `destination`, readable by the owner only; replaces a link there."""
    found = sorted(glob.glob(os.path.join(glob.escape(ray_folder), "session_2*", "logs")))
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


def main(serve_id: str, ray_folder: str, state_file: str) -> None:
    """The guard's process. It ignores the signals that end a `serve`."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    parent = os.getppid()
    sys.stdin.read()
    kill_marked(serve_id, ray_folder, exclude={os.getpid(), parent})
    with contextlib.suppress(OSError, ValueError):
        if log_folder := json.loads(Path(state_file).read_text())["log_folder"]:
            keep_logs(ray_folder, os.path.join(log_folder, "ray"))
    shutil.rmtree(ray_folder, ignore_errors=True)
    Path(state_file).unlink(missing_ok=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

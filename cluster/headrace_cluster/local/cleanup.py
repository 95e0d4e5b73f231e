"""What one serve starts and writes on this machine and must not leave there: its processes, its private files."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Self

from headrace_cluster.local import child_guard, state
from headrace_cluster.local.child_guard import ProcessMark
from headrace_cluster.local.processes import SERVE_ID_VARIABLE

FORCE_SECONDS = 3.0  # for killed processes to end in a forced stop
GUARD_SECONDS = 5.0  # for the child-process guard to end


class Cleanup:
    """Removes the files of one serve at its end, and kills its processes if it ends by force. Use it with `with`.

    Every process that is started meanwhile has the mark of this serve.
    """

    def __init__(self, folder: Path | None = None) -> None:
        """folder: processes with an open file in it have the mark, too; None: only those that inherit the variable."""
        serve_id = os.environ[SERVE_ID_VARIABLE] = state.new_key()  # every child inherits it, Ray's processes included
        self._mark = ProcessMark(f"{SERVE_ID_VARIABLE}={serve_id}", None if folder is None else str(folder))
        self._files: list[Path] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def remove_at_end(self, path: Path) -> None:
        """A file that must not outlive this serve, however it ends."""
        self._files.append(path)

    def close(self) -> None:
        """At the end in order. Idempotent."""
        for path in self._files:
            path.unlink(missing_ok=True)
        self._files.clear()

    def force(self) -> None:
        """Kills every process of this serve. May be called in any thread; the process must end right after it."""
        child_guard.kill_marked(self._mark, exclude={os.getpid()}, seconds=FORCE_SECONDS)
        for path in self._files:
            child_guard.remove(str(path))


class GuardedCleanup(Cleanup):
    """For a serve with its own Ray, which also ends with this process when it is killed: see child_guard.py."""

    def __init__(self, ray_folder: Path) -> None:
        """ray_folder: of our own Ray; it is removed at the end."""
        super().__init__(ray_folder)
        self.ray_folder = ray_folder
        self._logs = ""
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", child_guard.__file__, self._mark.variable, str(ray_folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def keep_ray_logs(self, destination: Path) -> None:
        """Where Ray's logs are moved at the end."""
        self._logs = str(destination)
        self._send(f"keep {self._logs}")

    def remove_at_end(self, path: Path) -> None:
        """A file that must not outlive this serve, however it ends."""
        super().remove_at_end(path)
        self._send(f"remove {path}")

    def close(self) -> None:
        """Kills what is left of our own Ray, and keeps its logs. Idempotent."""
        child_guard.kill_marked(self._mark, exclude={os.getpid(), self._guard.pid})
        if self._logs:
            child_guard.keep_logs(str(self.ray_folder), self._logs)
        child_guard.remove(str(self.ray_folder))
        super().close()
        with contextlib.suppress(OSError, ValueError):  # killed; closed before
            self._guard.communicate(b"done\n", timeout=GUARD_SECONDS)

    def force(self) -> None:
        """As for any serve; the guard moves the logs and removes the files after this process has ended."""
        child_guard.kill_marked(self._mark, exclude={os.getpid(), self._guard.pid}, seconds=FORCE_SECONDS)

    def _send(self, line: str) -> None:
        assert self._guard.stdin is not None
        with contextlib.suppress(OSError):  # the guard was killed
            self._guard.stdin.write(f"{line}\n".encode())
            self._guard.stdin.flush()

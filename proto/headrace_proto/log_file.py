"""One process's log file: private, appended to, bounded."""

import contextlib
import os
import threading
from pathlib import Path

MAX_BYTES = 16 << 20  # of a file; one earlier file of this size is kept beside it
STDERR = 2


class LogFile:
    """A file for its owner alone (0600). Beyond `max_bytes` it becomes `NAME.1`, and a new one begins. Thread-safe."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES, redirect_stderr: bool = False) -> None:
        """redirect_stderr: file descriptor 2 becomes the file, so native code writes there, too. Raises OSError."""
        self.path = path
        self._max_bytes = max_bytes
        self._redirect_stderr = redirect_stderr
        self._lock = threading.RLock()  # a signal handler may log in the thread that holds it
        self._descriptor = self._open()

    def write(self, text: str) -> None:
        """Appends whole lines. On a full disk they are lost: a log error must not end the process."""
        data = text.encode("utf-8", "backslashreplace")
        with self._lock, contextlib.suppress(OSError):
            if os.fstat(self._descriptor).st_size + len(data) > self._max_bytes:
                self._rotate()
            os.write(self._descriptor, data)

    def _open(self) -> int:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        if self._redirect_stderr:
            os.dup2(descriptor, STDERR)
        return descriptor

    def _rotate(self) -> None:
        with contextlib.suppress(FileNotFoundError):  # removed, or moved by a rotation that could not open the next one
            os.replace(self.path, previous(self.path))
        full = self._descriptor
        self._descriptor = self._open()
        os.close(full)


def previous(path: Path) -> Path:
    """The path that a full file is moved to."""
    return path.with_name(path.name + ".1")

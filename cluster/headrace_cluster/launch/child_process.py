"""A child process of `serve`, controller or router: its config comes through a pipe, and it is restarted."""

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import IO

from headrace_base.logs import stderr
from headrace_cluster.core.backoff import Backoff, Restarts
from headrace_cluster.errors import ChildFailedError

BACKOFF = Backoff(1.0, 30.0)  # between starts; after the first loss there is no pause
WINDOW_SECONDS = 120.0  # earlier losses do not count


class ChildProcess:
    """Not thread-safe; start it in the main thread: the child ends when that thread does."""

    def __init__(
        self,
        command: str,
        label: str,
        log: object,
        configure: Callable[[], bytes],
        read: Callable[[IO[bytes]], None] | None = None,
    ) -> None:
        """command: of headrace. log: the path of its log. configure: the config of the next start, for its stdin.

        read: called in a thread of each start, with the child's stdout; none: the child has no stdout.
        """
        self.was_up = False  # set by the owner: a child that was never up is not restarted
        self._command = command
        self._label = label
        self._log = log
        self._configure = configure
        self._read = read
        self._restarts = Restarts(BACKOFF, WINDOW_SECONDS, random.random)
        self._restart_at: float | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self) -> None:
        """Raises OSError."""
        # The same interpreter and environment; in a session of its own the terminal's Ctrl-C does not reach it.
        # -P: it imports no module of the current folder, which any user may have written.
        program = [sys.executable, "-P", "-m", "headrace_cluster"]
        self._process = subprocess.Popen(
            [*program, self._command, "--config-stdin", "--parent", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL if self._read is None else subprocess.PIPE,
            stderr=stderr(),
            start_new_session=True,
        )
        assert self._process.stdin is not None
        if self._read is not None:
            threading.Thread(target=self._read, args=[self._process.stdout], daemon=True).start()
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(self._configure())

    def watch(self) -> str:
        """Restarts it after it ended; a sentence when that was just found, else an empty string.

        Raises ChildFailedError if it was never up: the next one would end, too.
        """
        if self._restart_at is None:
            assert self._process is not None
            code = self._process.poll()
            if code is None:
                return ""
            how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
            return self._lose(f"{self._label} ended ({how})")
        if time.monotonic() < self._restart_at:
            return ""
        self._restart_at = None
        try:
            self.start()
        except OSError as error:  # for example for lack of memory
            return self._lose(f"{self._label} could not be started ({error})")
        return ""

    def replace(self, reason: str) -> str:
        """Kills it; `watch` starts another one. Returns a sentence with the reason, and raises, as `watch` does."""
        self.kill()
        return self._lose(f"{self._label} {reason}")

    def signal(self, number: int) -> None:
        """Sends a signal, if it runs."""
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kills it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _lose(self, sentence: str) -> str:
        if not self.was_up:
            raise ChildFailedError(f"{sentence}; its log: {self._log}")
        delay = self._restarts.lost(time.monotonic())
        self._restart_at = time.monotonic() + delay
        return f"{sentence}; starting another one {f'in {delay:.0f} s' if delay else 'now'}"

"""The controller of one `serve` as a child process: started again when it ends or does not answer."""

import contextlib
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import msgspec

from headrace_cluster.core.backoff import Backoff, Restarts
from headrace_cluster.core.view import ControllerConfig, View
from headrace_cluster.errors import ControllerLostError
from headrace_cluster.local.run_logs import log_path
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_proto.address import host_port
from headrace_proto.logs import stderr
from headrace_router.api.port_reservation import PortReservation

BACKOFF = Backoff(1.0, 30.0)  # between starts; before the first one there is no pause
WINDOW_SECONDS = 120.0  # earlier losses do not count
START_SECONDS = 60.0  # for a new process to answer
VIEW_SECONDS = 10.0  # for one that has answered before: replicas that load models use the same machine
STOP_SECONDS = 2.0


class ControllerProcess:
    """Holds the controller's ports, so that the next one has the same. Use it with `with`, in the main thread.

    Losses never end: without a controller the replicas are served, but no longer replaced.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        host: str,
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[], float] = random.random,
    ) -> None:
        """host: where routers reach it, unless the spec says so. Raises ListenError."""
        self._clock = clock
        self._restarts = Restarts(BACKOFF, WINDOW_SECONDS, random)
        control_host = spec.control.host or host
        self._admin = PortReservation(spec.admin.host, spec.admin.port, "the admin API", "--admin-port")
        self._control = PortReservation(control_host, spec.control.port or 0, "the controller", "--control-port")
        self._config: ControllerConfig | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._was_up = False  # this process, or one before it
        self._is_new = False  # it follows a lost one, and has not answered yet
        self._deadline = 0.0  # for its next answer
        self._restart_at: float | None = None
        self._messages: list[str] = []
        self._view: View | None = None  # the newest one, until it is taken
        self.admin_port, self.control_address = self._admin.port, host_port(control_host, self._control.port)
        control = spec.control.model_copy(update={"host": control_host, "port": self._control.port})
        admin = spec.admin.model_copy(update={"port": self._admin.port})
        self.spec = spec.model_copy(update={"control": control, "admin": admin})

    def __enter__(self) -> "ControllerProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._admin.close()
        self._control.close()

    def start(self, config: ControllerConfig) -> None:
        """Starts the first one."""
        self._config = config
        self._start()

    def poll(self) -> View | None:
        """The state of the cluster; None while the controller does not answer. Starts a lost one again when it is due.

        Raises ControllerLostError if it ended before any one of them was up: the next one would end, too.
        """
        now = self._clock()
        if self._restart_at is not None:
            if now >= self._restart_at:
                self._restart_at, self._is_new = None, True
                self._start()
            return None
        assert self._process is not None
        if (code := self._process.poll()) is not None:
            how = f"killed by signal {-code}" if code < 0 else f"exit status {code}"
            self._lose(f"the controller's process ended ({how})", now)
            return None
        if (view := self._newest()) is None:
            if now >= self._deadline:
                self._process.kill()
                self._process.wait()
                self._lose("the controller does not answer", now)
            return None
        if self._is_new:
            self._messages.append("a new controller runs")
        self._was_up, self._is_new = True, False
        self._deadline = self._clock() + VIEW_SECONDS
        return view

    def messages(self) -> list[str]:
        """What happened since the last call."""
        found, self._messages = self._messages, []
        return found

    def stop(self) -> None:
        """Ends the process, and leaves the replicas alone. Idempotent."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(STOP_SECONDS)
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        assert self._config is not None
        # As routers are started: see RouterProcess.
        program = [sys.executable, "-P", "-m", "headrace_cluster"]
        command = [*program, "controller", "--config-stdin", "--parent", str(os.getpid())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr(), start_new_session=True
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        threading.Thread(target=self._read, args=[self._process.stdout], name="views", daemon=True).start()
        with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
            pipe.write(msgspec.json.encode(self._config))
        self._deadline = self._clock() + START_SECONDS

    def _lose(self, sentence: str, now: float) -> None:
        if not self._was_up:
            path = log_path(Path(self._config.log_folder), "controller") if self._config is not None else ""
            raise ControllerLostError(f"{sentence}; its log: {path}")
        delay = self._restarts.lost(now)
        self._restart_at = now + delay
        soon = f"in {delay:.0f} s" if delay else "now"
        self._messages.append(f"{sentence}; starting another one {soon}, serving goes on")

    def _newest(self) -> View | None:
        """What it has told since the last call."""
        view, self._view = self._view, None
        return view

    def _read(self, pipe: IO[bytes]) -> None:
        """In a thread of each process: one view a line."""
        with contextlib.suppress(ValueError, msgspec.MsgspecError):  # it was killed in the middle of a line
            for line in pipe:
                self._view = msgspec.json.decode(line, type=View)

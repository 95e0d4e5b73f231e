"""The controller of one `serve` as a child process: started again when it ends or does not answer."""

import contextlib
import signal
import time
from functools import partial
from pathlib import Path
from typing import IO

import msgspec

from headrace_base.address import host_port
from headrace_cluster.core.view import ClusterView, ControllerConfig
from headrace_cluster.launch.child_process import ChildProcess
from headrace_cluster.local.run_logs import log_path
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_router.api.listen import PortReservation

START_SECONDS = 60.0  # for a new process to answer
VIEW_SECONDS = 10.0  # for one that has answered before: replicas that load models use the same machine
STOP_SECONDS = 2.0
POLL_SECONDS = 0.02


class ControllerProcess:
    """Holds the controller's ports, so that the next one has the same. Use it with `with`, in the main thread.

    Losses never end: without a controller the replicas are served, but no longer replaced.
    """

    def __init__(self, spec: ClusterSpec, host: str) -> None:
        """host: where routers reach it, unless the spec says so. Raises ListenError."""
        control_host = spec.control.host or host
        self._admin = PortReservation(spec.admin.host, spec.admin.port, "the admin API", "--admin-port")
        self._control = PortReservation(control_host, spec.control.port or 0, "the controller", "--control-port")
        self._child: ChildProcess | None = None
        self._pid: int | None = None  # process to which `_deadline` applies
        self._deadline = 0.0  # for its next answer
        self._view: ClusterView | None = None  # the newest one, until it is taken
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
        log = log_path(Path(config.log_folder), "controller")
        encode = partial(msgspec.json.encode, config)
        self._child = ChildProcess("controller", "the controller", log, encode, self._read)
        self._child.start()

    def poll(self) -> tuple[ClusterView | None, str]:
        """The state of the cluster, None while the controller does not answer; and what happened, or an empty string.

        Starts a lost controller again when that is due. Raises ChildFailedError if it ended before one was up.
        """
        child = self._child
        assert child is not None
        event = child.watch()
        if event or not child.running:
            return None, event
        if child.pid != self._pid:
            self._pid, self._view, self._deadline = child.pid, None, time.monotonic() + START_SECONDS
        view, self._view = self._view, None
        if view is not None:
            child.was_up = True
            self._deadline = time.monotonic() + VIEW_SECONDS
        elif time.monotonic() >= self._deadline:
            event = child.replace("does not answer")
        return view, event

    def stop(self) -> None:
        """Ends the process, and leaves the replicas alone. Idempotent."""
        if self._child is None:
            return
        self._child.signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while self._child.running and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self._child.kill()

    def _read(self, pipe: IO[bytes]) -> None:
        """In a thread of each process: one view a line."""
        with contextlib.suppress(ValueError, msgspec.MsgspecError):  # it was killed in the middle of a line
            for line in pipe:
                self._view = msgspec.json.decode(line, type=ClusterView)

"""A cluster on Ray in the process that starts it: used by `headrace serve` and `headrace controller`."""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from headrace_cluster.core import naming
from headrace_cluster.core.rank_config import REPLICA_CLASS
from headrace_cluster.core.snapshot import ControllerSnapshot
from headrace_cluster.core.view import ControllerArgs, Opened, View
from headrace_cluster.errors import ClusterExistsError, ControllerLostError, RayLostError, ReplicaFailedError
from headrace_cluster.local import child_guard, state
from headrace_cluster.local.processes import SERVE_ID_VARIABLE, ProcessId
from headrace_cluster.local.run_logs import RAY_FOLDER, RunFolder, link_ray_logs, log_path
from headrace_cluster.program import program_name
from headrace_cluster.ray import local_ray
from headrace_cluster.ray.local_ray import RayLink
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_proto.errors import HeadraceError
from headrace_proto.logs import LogConfig, configure_logs

VIEW_SECONDS = 10.0  # for the controller to reply: replicas that load models use the same machine
OPEN_SECONDS = 60.0
NAME_SECONDS = 10.0  # for Ray to detect that the last controller is dead
CLOSE_SECONDS = 20.0
JOINED_SECONDS = 2.0  # for a joined Ray to end our actors in a forced stop


class ClusterSession:
    """Starts and ends Ray and the controller actor. Use it with `with`, in the main thread."""

    def __init__(self, spec: ClusterSpec, secret: bytes, replica_class: str = REPLICA_CLASS) -> None:
        self.spec = spec
        self.secret = secret
        self.admin_key = state.new_key()
        self.link: RayLink | None = None
        self.opened = Opened()
        self.token_file: Path | None = None
        self.logs: RunFolder | None = None  # from `open_logs` on
        self._replica_class = replica_class
        self._controller: Any = None
        self._process: ProcessId | None = None  # of the controller, if it is certainly on this machine
        self._ray_started = False
        self._temp_dir: Path | None = None
        self._paths: list[Path] = []
        self._guard: subprocess.Popen[bytes] | None = None
        # In this process's environment, hence in that of every child, Ray's included.
        self._serve_id = os.environ[SERVE_ID_VARIABLE] = state.new_key()

    def __enter__(self) -> "ClusterSession":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(orderly=not isinstance(error, KeyboardInterrupt))

    # -- up ---------------------------------------------------------------------------------------------------

    def open_logs(self) -> Path:
        """Creates the folder of this run; this process logs there from now on. Raises StateError."""
        self.logs = RunFolder(self.spec.cluster, self.spec.admin.port)
        path = str(log_path(self.logs.path, "serve"))
        configure_logs(LogConfig("serve", path=path, format=self.spec.logs.format))
        return self.logs.path

    def connect(self) -> RayLink:
        """Starts or joins Ray; after `open_logs`. Raises RayStartError."""
        assert self.logs is not None
        self._ray_started = True
        if self.spec.ray.address is not None:
            self.link = local_ray.join(self.spec)
            return self.link
        self.token_file = state.home() / f"ray-token-{os.getpid()}"
        state.write_private(self.token_file, state.new_key())
        self._temp_dir = local_ray.make_temp_dir()
        self._start_guard()
        self.remove_at_end(self.token_file)
        self._send_guard(f"keep {self.logs.path / RAY_FOLDER}")
        self.link = local_ray.start_own(self.spec, self.token_file, self._temp_dir)
        link_ray_logs(self.logs.path, self._temp_dir)
        return self.link

    def open_controller(self) -> Opened:
        """Starts the controller actor, which begins to build replicas. Raises ListenError, ClusterExistsError."""
        from headrace_cluster.ray import names as ray_names

        assert self.link is not None
        if ray_names.find_actor(naming.CONTROLLER, self.spec.cluster) is not None:
            raise ClusterExistsError(
                f"a cluster named '{self.spec.cluster}' runs already in the Ray at {self.link.address}; stop it with "
                f"`{program_name()} stop`, or give this one another name with --cluster"
            )
        self.opened = self._open(self.spec, None)
        return self.opened

    def restart_controller(self, snapshot: ControllerSnapshot | None) -> None:
        """Starts another controller after one was lost, on the ports that routers and the command line use.

        It adopts the replicas that are up. Raises HeadraceError; the call may be repeated.
        """
        import ray

        from headrace_cluster.ray import names as ray_names

        self._end_controller()
        deadline = time.monotonic() + NAME_SECONDS
        while ray_names.find_actor(naming.CONTROLLER, self.spec.cluster) is not None:
            if time.monotonic() > deadline:
                raise ControllerLostError("the controller's process does not end")
            time.sleep(0.05)
        control = self.spec.control.model_copy(update={"port": self.opened.control_port})
        admin = self.spec.admin.model_copy(update={"port": self.opened.admin_port})
        try:
            self.opened = self._open(self.spec.model_copy(update={"control": control, "admin": admin}), snapshot)
        except (ray.exceptions.RayError, ValueError) as error:  # a timeout; a name in use
            raise ControllerLostError("the controller's process ended, or did not answer, while it started") from error

    def _open(self, spec: ClusterSpec, snapshot: ControllerSnapshot | None) -> Opened:
        import ray

        from headrace_cluster.ray.controller_actor import ControllerActor

        assert self.link is not None and self.logs is not None
        args = ControllerArgs(
            spec=spec.model_dump_json(exclude={"auth"}),
            secret=self.secret,
            admin_key=self.admin_key,
            loopback=self.link.owned,
            replica_class=self._replica_class,
            snapshot=snapshot,
            log_folder=str(self.logs.path),
        )
        options = ray.remote(ControllerActor).options(
            name=naming.CONTROLLER,
            namespace=naming.namespace(self.spec.cluster),
            lifetime="detached",
            num_cpus=0,
            # Ray would restart it with its first arguments; `restart_controller` passes newer ones.
            max_restarts=0,
            # On the node of Ray's head: both exist once, and fail together.
            resources={"node:__internal_head__": 0.001},
        )
        self._controller = options.remote(msgspec.msgpack.encode(args))
        opened = msgspec.msgpack.decode(ray.get(self._controller.open.remote(), timeout=OPEN_SECONDS), type=Opened)
        if opened.error:
            raise HeadraceError(opened.error)
        self._process = ProcessId.of(opened.pid) if self.link.owned else None
        return opened

    def remove_at_end(self, path: Path) -> None:
        """A file that must not outlive this session, however it ends."""
        self._paths.append(path)
        self._send_guard(f"remove {path}")

    # -- while it runs ----------------------------------------------------------------------------------------

    def view(self) -> View:
        """State of the cluster. Raises ControllerLostError, and ReplicaFailedError when the cluster cannot start."""
        import ray

        try:
            encoded = ray.get(self._controller.view.remote(), timeout=VIEW_SECONDS)
        except ray.exceptions.GetTimeoutError as error:
            raise ControllerLostError(f"the controller has not answered for {VIEW_SECONDS:g} s") from error
        except ray.exceptions.RayError as error:
            raise ControllerLostError("the controller's process ended") from error
        view = msgspec.msgpack.decode(encoded, type=View)
        if view.fatal:
            raise ReplicaFailedError(view.fatal)
        return view

    # -- down -------------------------------------------------------------------------------------------------

    @property
    def ray_alive(self) -> bool:
        """False once our own Ray has lost a process: no call of it can finish."""
        return self.spec.ray.address is not None or not local_ray.dead_processes()

    def check_ray(self) -> None:
        """Raises RayLostError when a process of our own Ray has ended: a call of it would wait for a minute."""
        if self.spec.ray.address is None and (dead := local_ray.dead_processes()):
            raise RayLostError(
                f"Ray's {' and '.join(dead)} ended, and with it every replica; start again, or join a Ray that is "
                "supervised (--ray-address)"
            )

    @property
    def ray_killed(self) -> bool:
        """After `close`: Ray did not end in order. Its exit handlers would wait for it, and log."""
        return self._ray_started

    def close(self, *, orderly: bool = True) -> None:
        """Ends replicas, controller and, if it is our own, Ray: in this order, and nothing else. Idempotent.

        If not `orderly`, or if our own Ray has lost a process, that Ray is killed: a call of a Ray that is partly up
        may wait for a minute.
        """
        if self._ray_started and (self.spec.ray.address is not None or (orderly and self.ray_alive)):
            self._close_controller()
            if self.ray_alive:
                local_ray.disconnect()
                self._ray_started = False
        if self._temp_dir is not None:
            child_guard.kill_marked(self._mark(), exclude=self._excluded_pids())
            if self.logs is not None:
                child_guard.keep_logs(str(self._temp_dir), str(self.logs.path / RAY_FOLDER))
            child_guard.remove(str(self._temp_dir))
        for path in self._paths:
            path.unlink(missing_ok=True)
        self._paths.clear()
        if self._guard is not None:
            with contextlib.suppress(OSError):
                self._guard.communicate(b"done\n", timeout=5)
            self._guard = None
        if self.logs is not None:
            self.logs.close()

    def force_close(self) -> None:
        """Ends every process that this session started, at once. The guard removes the files that were sent to it.

        May be called in any thread; the process must end right after it. In a joined Ray our actors are ended by name.
        """
        if self.spec.ray.address is not None and self._controller is not None:
            closing = threading.Thread(target=self._end_by_name, daemon=True)
            closing.start()
            closing.join(JOINED_SECONDS)
        child_guard.kill_marked(self._mark(), exclude=self._excluded_pids(), seconds=3)
        if self._guard is None:
            for path in (*self._paths, *([self._temp_dir] if self._temp_dir is not None else ())):
                child_guard.remove(str(path))

    def _end_by_name(self) -> None:
        from headrace_cluster.ray import names as ray_names

        with contextlib.suppress(Exception):  # this Ray may have ended
            ray_names.end_cluster(self.spec.cluster)

    def _close_controller(self) -> None:
        import ray

        if self._controller is None:
            return
        with contextlib.suppress(Exception):  # actors that remain are ended by name below
            closed, deadline = self._controller.close.remote(), time.monotonic() + CLOSE_SECONDS
            while time.monotonic() < deadline and self.ray_alive and not ray.wait([closed], timeout=0.2)[0]:
                pass
        if self.ray_alive:
            self._end_by_name()
        self._controller = None

    def _end_controller(self) -> None:
        """A lost controller may still be alive without replying."""
        from headrace_cluster.ray import names as ray_names

        ray_names.kill_actor(naming.CONTROLLER, self.spec.cluster)
        if self._process is not None:
            self._process.signal(signal.SIGKILL)  # a stopped process does not handle Ray's request

    def _start_guard(self) -> None:
        mark = self._mark()
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", child_guard.__file__, mark.variable, mark.folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        for path in self._paths:
            self._send_guard(f"remove {path}")

    def _send_guard(self, line: str) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.write(f"{line}\n".encode())
            self._guard.stdin.flush()

    def _mark(self) -> child_guard.ProcessMark:
        return child_guard.ProcessMark(f"{SERVE_ID_VARIABLE}={self._serve_id}", str(self._temp_dir))

    def _excluded_pids(self) -> set[int]:
        return {os.getpid()} | ({self._guard.pid} if self._guard is not None else set())

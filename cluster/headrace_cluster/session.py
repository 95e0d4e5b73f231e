"""A cluster on Ray, seen from the process that starts it: `headrace serve` and `headrace controller` share this."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from headrace_cluster import local_ray, naming, reaper, state
from headrace_cluster.controller.memory import ControllerMemory
from headrace_cluster.controller.view import ControllerArgs, Opened, View
from headrace_cluster.errors import ClusterExistsError, ControllerLostError, ReplicaFailedError
from headrace_cluster.local_ray import RayLink
from headrace_cluster.processes import SERVE_ID_VARIABLE, ProcessId
from headrace_cluster.rank_config import REPLICA_CLASS
from headrace_cluster.spec import ClusterSpec
from headrace_proto.errors import HeadraceError

LOOK_SECONDS = 10.0  # for the controller to answer: it shares the machine with loading models
OPEN_SECONDS = 60.0
NAME_SECONDS = 10.0  # for Ray to notice that the last controller is dead
CLOSE_SECONDS = 20.0


class ClusterSession:
    """Ray, the controller actor, and the way back. Use it with `with`, in the main thread."""

    def __init__(self, spec: ClusterSpec, secret: bytes, replica_class: str = REPLICA_CLASS) -> None:
        self.spec = spec
        self.secret = secret
        self.admin_key = state.new_key()
        self.link: RayLink | None = None
        self.opened = Opened()
        self.token_file: Path | None = None
        self._replica_class = replica_class
        self._controller: Any = None
        self._process: ProcessId | None = None  # of the controller, where it is on this machine for sure
        self._touched_ray = False
        self._temp_dir: Path | None = None
        self._paths: list[Path] = []
        self._reaper: subprocess.Popen[bytes] | None = None
        # In this process's environment, hence in that of every child, Ray's included.
        self._serve_id = os.environ[SERVE_ID_VARIABLE] = state.new_key()

    def __enter__(self) -> "ClusterSession":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failed = error is not None and not isinstance(error, KeyboardInterrupt | SystemExit)
        self.close(keep_logs=failed)

    # -- up ---------------------------------------------------------------------------------------------------

    def connect(self) -> RayLink:
        """Starts or joins Ray. Raises RayStartError."""
        self._touched_ray = True
        if self.spec.ray.address is not None:
            self.link = local_ray.join(self.spec)
            return self.link
        self.token_file = state.home() / f"ray-token-{os.getpid()}"
        state.write_private(self.token_file, state.new_key())
        self._temp_dir = local_ray.make_temp_dir()
        self._start_reaper()
        self.remove_at_end(self.token_file)
        self.link = local_ray.start_own(self.spec, self.token_file, self._temp_dir)
        return self.link

    def open_controller(self) -> Opened:
        """Starts the controller actor, which begins to build replicas. Raises ListenError, ClusterExistsError."""
        from headrace_cluster import ray_names

        assert self.link is not None
        if ray_names.find_actor(naming.CONTROLLER, self.spec.cluster) is not None:
            raise ClusterExistsError(
                f"a cluster named '{self.spec.cluster}' runs already in the Ray at {self.link.address}; stop it with "
                "`headrace stop`, or give this one another name with --cluster"
            )
        self.opened = self._open(self.spec, None)
        return self.opened

    def return_controller(self, memory: ControllerMemory | None) -> None:
        """Starts another controller after one was lost, where routers and the command line know it.

        It adopts the replicas that are up. Raises HeadraceError; it may be tried again.
        """
        import ray

        from headrace_cluster import ray_names

        self._end_controller()
        deadline = time.monotonic() + NAME_SECONDS
        while ray_names.find_actor(naming.CONTROLLER, self.spec.cluster) is not None:
            if time.monotonic() > deadline:
                raise ControllerLostError("the controller's process does not end")
            time.sleep(0.05)
        control = self.spec.control.model_copy(update={"port": self.opened.control_port})
        admin = self.spec.admin.model_copy(update={"port": self.opened.admin_port})
        try:
            self.opened = self._open(self.spec.model_copy(update={"control": control, "admin": admin}), memory)
        except (ray.exceptions.RayError, ValueError) as error:  # a timeout is the one, a name in use the other
            raise ControllerLostError("the controller's process ended, or did not answer, while it started") from error

    def _open(self, spec: ClusterSpec, memory: ControllerMemory | None) -> Opened:
        import ray

        from headrace_cluster.controller.actor import ControllerActor

        assert self.link is not None
        args = ControllerArgs(
            spec=spec.model_dump_json(exclude={"auth"}),
            secret=self.secret,
            admin_key=self.admin_key,
            loopback=self.link.owned,
            replica_class=self._replica_class,
            memory=memory,
        )
        options = ray.remote(ControllerActor).options(
            name=naming.CONTROLLER,
            namespace=naming.namespace(self.spec.cluster),
            lifetime="detached",
            num_cpus=0,
            # Ray would start it again with what it was given first; we know more by then: see `return_controller`.
            max_restarts=0,
            # Where Ray's head is, the controller is: both are single, and fail together.
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
        if self._reaper is not None and self._reaper.stdin is not None:
            self._reaper.stdin.write(f"remove {path}\n".encode())
            self._reaper.stdin.flush()

    # -- meanwhile --------------------------------------------------------------------------------------------

    def view(self) -> View:
        """How the cluster is. Raises ControllerLostError, and ReplicaFailedError when the cluster cannot start."""
        import ray

        try:
            encoded = ray.get(self._controller.view.remote(), timeout=LOOK_SECONDS)
        except ray.exceptions.GetTimeoutError as error:
            raise ControllerLostError(f"the controller has not answered for {LOOK_SECONDS:g} s") from error
        except ray.exceptions.RayError as error:
            raise ControllerLostError("the controller's process ended") from error
        view = msgspec.msgpack.decode(encoded, type=View)
        if view.fatal:
            raise ReplicaFailedError(view.fatal)
        return view

    @property
    def logs(self) -> Path:
        """Where logs are kept when a session fails."""
        return state.home() / "logs" / f"serve-{self.opened.admin_port or self.spec.admin.port}"

    # -- down -------------------------------------------------------------------------------------------------

    def close(self, *, keep_logs: bool) -> None:
        """Ends replicas, controller and, if it is ours, Ray: in this order, and nothing else. Idempotent."""
        if self._touched_ray:
            self._close_controller()
            local_ray.leave()
            self._touched_ray = False
        if self._temp_dir is not None:
            reaper.kill_marked(self._mark(), spare=self._spared())
            if keep_logs and local_ray.keep_logs(self._temp_dir, self.logs):
                print(f"headrace: the logs of all processes are in {self.logs}", file=sys.stderr)
            reaper.remove(str(self._temp_dir))
            self._temp_dir = None
        for path in self._paths:
            path.unlink(missing_ok=True)
        self._paths.clear()
        if self._reaper is not None:
            with contextlib.suppress(OSError):
                self._reaper.communicate(b"done\n", timeout=5)
            self._reaper = None

    def force_close(self) -> None:
        """Ends every process that this session started, at once; files are left to the reaper."""
        reaper.kill_marked(self._mark(), spare=self._spared(), patience=3)

    def _close_controller(self) -> None:
        import ray

        from headrace_cluster import ray_names

        if self._controller is None:
            return
        with contextlib.suppress(Exception):  # whatever is left is ended by name below
            ray.get(self._controller.close.remote(), timeout=CLOSE_SECONDS)
        with contextlib.suppress(Exception):
            ray_names.end_cluster(self.spec.cluster)
        self._controller = None

    def _end_controller(self) -> None:
        """One that is lost may still live, and not answer."""
        from headrace_cluster import ray_names

        ray_names.kill_actor(naming.CONTROLLER, self.spec.cluster)
        if self._process is not None:
            self._process.signal(signal.SIGKILL)  # a stopped process does not hear Ray

    def _start_reaper(self) -> None:
        mark = self._mark()
        self._reaper = subprocess.Popen(
            [sys.executable, "-I", "-S", reaper.__file__, mark.variable, mark.folder],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def _mark(self) -> reaper.Mark:
        return reaper.Mark(f"{SERVE_ID_VARIABLE}={self._serve_id}", str(self._temp_dir))

    def _spared(self) -> set[int]:
        return {os.getpid()} | ({self._reaper.pid} if self._reaper is not None else set())

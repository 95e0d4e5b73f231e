"""The controller's actor, as the process that starts it uses it."""

import contextlib
import signal
import time
from types import TracebackType
from typing import Any, Self

import msgspec

from headrace_cluster.core import naming
from headrace_cluster.core.snapshot import ControllerSnapshot
from headrace_cluster.core.view import ControllerArgs, Opened, View
from headrace_cluster.errors import ClusterExistsError, ControllerLostError, ReplicaFailedError
from headrace_cluster.local.processes import ProcessId
from headrace_cluster.program import program_name
from headrace_cluster.ray.connection import RayConnection
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_proto.errors import HeadraceError

VIEW_SECONDS = 10.0  # for the controller to reply: replicas that load models use the same machine
OPEN_SECONDS = 60.0
NAME_SECONDS = 10.0  # for Ray to detect that the last controller is dead
CLOSE_SECONDS = 20.0


class ControllerHandle:
    """The controller of one cluster, and the next one after it was lost. Use it with `with`, in one thread."""

    def __init__(self, spec: ClusterSpec, args: ControllerArgs, ray: RayConnection) -> None:
        """Creates the actor, which does nothing until `open`. Raises ClusterExistsError."""
        self._spec = spec
        self._args = args
        self._ray = ray
        self._process: ProcessId | None = None  # if it is certainly on this machine
        if _is_up(spec.cluster):
            raise ClusterExistsError(
                f"a cluster named '{spec.cluster}' runs already in the Ray at {ray.link.address}; stop it with "
                f"`{program_name()} stop`, or give this one another name with --cluster"
            )
        self._actor = self._create()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._ray.ends_in_order(error):
            self.close()

    def open(self) -> Opened:
        """Has it listen and build replicas; later controllers listen on the same ports. Raises ListenError."""
        import ray

        opened = msgspec.msgpack.decode(ray.get(self._actor.open.remote(), timeout=OPEN_SECONDS), type=Opened)
        if opened.error:
            raise HeadraceError(opened.error)
        control = self._spec.control.model_copy(update={"port": opened.control_port})
        admin = self._spec.admin.model_copy(update={"port": opened.admin_port})
        same_ports = self._spec.model_copy(update={"control": control, "admin": admin})
        self._args = msgspec.structs.replace(self._args, spec=same_ports.model_dump_json(exclude={"auth"}))
        self._process = ProcessId.of(opened.pid) if self._ray.link.owned else None
        return opened

    def view(self) -> View:
        """State of the cluster. Raises ControllerLostError, and ReplicaFailedError when the cluster cannot start."""
        import ray

        try:
            encoded = ray.get(self._actor.view.remote(), timeout=VIEW_SECONDS)
        except ray.exceptions.GetTimeoutError as error:
            raise ControllerLostError(f"the controller has not answered for {VIEW_SECONDS:g} s") from error
        except ray.exceptions.RayError as error:
            raise ControllerLostError("the controller's process ended") from error
        view = msgspec.msgpack.decode(encoded, type=View)
        if view.fatal:
            raise ReplicaFailedError(view.fatal)
        return view

    def restart(self, snapshot: ControllerSnapshot | None) -> None:
        """Starts another controller after one was lost, on the ports that routers and the command line use.

        It adopts the replicas that are up. Raises HeadraceError; the call may be repeated.
        """
        import ray

        self._end()
        deadline = time.monotonic() + NAME_SECONDS
        while _is_up(self._spec.cluster):
            if time.monotonic() > deadline:
                raise ControllerLostError("the controller's process does not end")
            time.sleep(0.05)
        self._args = msgspec.structs.replace(self._args, snapshot=snapshot)
        try:
            self._actor = self._create()
            self.open()
        except (ray.exceptions.RayError, ValueError) as error:  # a timeout; a name in use
            raise ControllerLostError("the controller's process ended, or did not answer, while it started") from error

    def close(self) -> None:
        """Has it drain and end every replica; what is left then ends by name. Never raises."""
        import ray

        with contextlib.suppress(Exception):
            closed, deadline = self._actor.close.remote(), time.monotonic() + CLOSE_SECONDS
            while time.monotonic() < deadline and self._ray.alive and not ray.wait([closed], timeout=0.2)[0]:
                pass
        if self._ray.alive:
            self._ray.end_actors()

    def _create(self) -> Any:
        import ray

        from headrace_cluster.ray.controller_actor import ControllerActor

        options = ray.remote(ControllerActor).options(
            name=naming.CONTROLLER,
            namespace=naming.namespace(self._spec.cluster),
            lifetime="detached",
            num_cpus=0,
            # Ray would restart it with its first arguments; `restart` passes newer ones.
            max_restarts=0,
            # On the node of Ray's head: both exist once, and fail together.
            resources={"node:__internal_head__": 0.001},
        )
        return options.remote(msgspec.msgpack.encode(self._args))

    def _end(self) -> None:
        """A lost controller may still be alive without replying."""
        from headrace_cluster.ray import names as ray_names

        ray_names.kill_actor(naming.CONTROLLER, self._spec.cluster)
        if self._process is not None:
            self._process.signal(signal.SIGKILL)  # a stopped process does not handle Ray's request


def _is_up(cluster: str) -> bool:
    from headrace_cluster.ray import names as ray_names

    return ray_names.find_actor(naming.CONTROLLER, cluster) is not None

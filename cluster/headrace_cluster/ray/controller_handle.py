"""The controller's actor, as the process that starts it uses it."""

import contextlib
import importlib.util
import signal
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

import msgspec

from headrace_cluster.core import naming
from headrace_cluster.core.adoption import find_foreign
from headrace_cluster.core.driver import REPORT_SECONDS
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.rank_config import RankReport
from headrace_cluster.core.revisions import Revisions, kept_revisions, with_commits
from headrace_cluster.core.snapshot import Keeper
from headrace_cluster.core.view import ControllerArgs, ControllerSecrets, Opened, View
from headrace_cluster.errors import ClusterExistsError, ControllerLostError, ControllerTakenError
from headrace_cluster.local import state
from headrace_cluster.local.authority import ClusterAuthority
from headrace_cluster.local.processes import ProcessId
from headrace_cluster.local.secret_file import ClusterSecrets
from headrace_cluster.program import program_name
from headrace_cluster.ray.connection import RayConnection
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_proto.errors import HeadraceError
from headrace_proto.identity import seal

VIEW_SECONDS = 10.0  # for the controller to reply: replicas that load models use the same machine
OPEN_SECONDS = 60.0
NAME_SECONDS = 10.0  # for Ray to detect that the last controller is dead
CLOSE_SECONDS = 20.0
TAKE_SECONDS = 6.0  # for a controller without keeper to notice it; longer than its UNWATCHED_SECONDS
POLL_SECONDS = 0.5


class ControllerHandle:
    """The controller of one cluster, and the next one after it was lost. Use it with `with`.

    Every call of Ray may wait until Ray's GCS answers, `poll` and `restart` included: they have a thread of their own,
    between `open` and the end.
    """

    def __init__(
        self,
        spec: ClusterSpec,
        args: ControllerArgs,
        secrets: ClusterSecrets,
        admin_key: str,
        ray: RayConnection,
        revisions: Revisions,
    ) -> None:
        """Creates the actor, which does nothing until `open`. The controller of a keeper that ended is replaced.

        revisions: those of the spec that were resolved; the commits of an earlier keeper precede them.
        Raises ClusterExistsError when another process keeps a cluster of this name; AdoptionError when these secrets
        are not those of the ranks: then the last controller goes on.
        """
        from headrace_cluster.ray.cluster_record import ClusterRecord

        self._args = args
        self._secrets = secrets
        self._admin_key = admin_key
        self._sent: tuple[bytes, ...] = ()  # secrets that the controller has
        self._ray = ray
        self._id = state.new_key()
        self._process: ProcessId | None = None  # if it is certainly on this machine
        self._record = ClusterRecord(spec.cluster)
        # First of all: an end of this process from here on leaves alone what an earlier one started.
        ray.serves = _exists(spec.cluster)
        if _is_watched(spec.cluster):
            raise ClusterExistsError(
                f"a cluster named '{spec.cluster}' runs already in the Ray at {ray.link.address}, and another `serve` "
                "or `controller` keeps it: end that one with Ctrl-C (its replicas go on), and this command attaches to "
                f"them; stop all with `{program_name()} stop`; or give this one another name with --cluster"
            )
        if ray.serves:
            _check_secrets(spec.cluster, secrets.current)
        earlier = self._record.keeper() or Keeper(id=self._id)
        self.revisions = kept_revisions(spec, revisions, earlier.revisions)
        self._spec = with_commits(spec, self.revisions)
        self._take_over(earlier.control_port, earlier.admin_port)
        self._end()
        self._actor = self._create()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._ray.destroys:
            return
        if self._ray.ends_in_order(error):
            self.close()
        else:
            self._ray.force_end()

    def open(self) -> Opened:
        """Has it listen and build replicas; later controllers listen on the same ports. Raises ListenError."""
        import ray

        secrets = self._secrets.current
        opening = self._actor.open.remote(self._seal(secrets))
        opened = msgspec.msgpack.decode(ray.get(opening, timeout=OPEN_SECONDS), type=Opened)
        self._sent = secrets
        if opened.error:
            raise HeadraceError(opened.error)
        self._take_over(opened.control_port, opened.admin_port)
        self._ray.serves = self._ray.serves or opened.adopted > 0
        self._process = ProcessId.of(opened.pid) if self._ray.link.owned else None
        return opened

    def poll(self) -> View:
        """Sends the cluster's secrets if they have changed; returns the state. Raises ControllerLostError."""
        import ray

        try:
            self._send_changed_secrets()
            encoded = ray.get(self._actor.view.remote(), timeout=VIEW_SECONDS)
        except ray.exceptions.GetTimeoutError as error:
            raise ControllerLostError(f"the controller has not answered for {VIEW_SECONDS:g} s") from error
        except ray.exceptions.RayError as error:
            raise ControllerLostError("the controller's process ended") from error
        view = msgspec.msgpack.decode(encoded, type=View)
        self._ray.serves = self._ray.serves or bool(view.started)
        return view

    def restart(self) -> None:
        """Starts another controller after one was lost, on the ports that routers and the command line use.

        It adopts the replicas that are up. Raises HeadraceError; the call may be repeated, but not after
        ControllerTakenError.
        """
        import ray

        try:
            keeper = self._record.keeper()
            if keeper is not None and keeper.id != self._id:
                raise ControllerTakenError(
                    f"another process has taken over the cluster '{self._spec.cluster}', which goes on; this one ends"
                )
            self._end()
            if self._ray.blocked:  # this call was waited for, and the cluster ends without it
                raise ControllerLostError("this process ends")
            self._actor = self._create()
            self.open()
        except (ray.exceptions.RayError, ValueError) as error:  # Ray does not answer; a timeout; a name in use
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

    def _send_changed_secrets(self) -> None:
        import ray

        if self._sent != (secrets := self._secrets.current):
            ray.get(self._actor.use_secrets.remote(self._seal(secrets)), timeout=VIEW_SECONDS)
            self._sent = secrets

    def _seal(self, secrets: tuple[bytes, ...]) -> bytes:
        """For the controller's process alone: Ray's connections are not encrypted."""
        import ray

        request = ray.get(self._actor.request.remote(), timeout=OPEN_SECONDS)
        return seal(request, msgspec.msgpack.encode(ControllerSecrets(secrets=secrets, admin_key=self._admin_key)))

    def _take_over(self, control_port: int, admin_port: int) -> None:
        """This process is the keeper. The next controller listens on these ports, where the spec leaves the choice."""
        self._record.save_keeper(
            Keeper(id=self._id, control_port=control_port, admin_port=admin_port, revisions=self.revisions)
        )
        control, admin = self._spec.control, self._spec.admin
        control = control.model_copy(update={"port": control.port or control_port})
        admin = admin.model_copy(update={"port": admin.port or admin_port})
        spec = self._spec.model_copy(update={"control": control, "admin": admin})
        self._args = msgspec.structs.replace(self._args, spec=spec.model_dump_json(exclude={"auth"}))

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
            # Ray's actors use uvloop where it is installed; its TLS lacks what that of the admin API needs.
            runtime_env={"env_vars": {"RAY_USE_UVLOOP": "0"}} if importlib.util.find_spec("uvloop") else None,
            # On the node of Ray's head: both exist once, and fail together.
            resources={"node:__internal_head__": 0.001},
        )
        return options.remote(msgspec.msgpack.encode(self._args))

    def _end(self) -> None:
        """Ends the last controller, which may be alive without replying. Raises ControllerLostError."""
        from headrace_cluster.ray import names as ray_names

        ray_names.kill_actor(naming.CONTROLLER, self._spec.cluster)
        if self._process is not None:
            self._process.signal(signal.SIGKILL)  # a stopped process does not handle Ray's request
        deadline = time.monotonic() + NAME_SECONDS
        while ray_names.find_actor(naming.CONTROLLER, self._spec.cluster) is not None:
            if time.monotonic() > deadline:
                raise ControllerLostError("the controller's process does not end")
            time.sleep(0.05)


def _exists(cluster: str) -> bool:
    """Whether a controller or a rank of this cluster is in Ray."""
    from headrace_cluster.ray import names as ray_names

    controller = ray_names.find_actor(naming.CONTROLLER, cluster)
    return controller is not None or bool(ray_names.rank_actors(cluster))


def _check_secrets(cluster: str, secrets: Sequence[bytes]) -> None:
    """Raises AdoptionError if a controller with these secrets could adopt none of the ranks that reply."""
    import ray

    from headrace_cluster.ray import names as ray_names

    calls = {actor.report.remote(): rank for rank, actor in ray_names.rank_actors(cluster).items()}
    replied, _ = ray.wait(list(calls), num_returns=len(calls), timeout=REPORT_SECONDS) if calls else ([], [])
    reports: dict[tuple[ReplicaName, int], RankReport | None] = dict.fromkeys(calls.values())
    for call in replied:
        # A rank that has ended, or is of another version, shows nothing about the secret.
        with contextlib.suppress(ray.exceptions.RayError, msgspec.MsgspecError):
            reports[calls[call]] = msgspec.msgpack.decode(ray.get(call), type=RankReport)
    find_foreign(reports, ClusterAuthority(secrets).fingerprints)


def _is_watched(cluster: str) -> bool:
    """Whether a controller is up and another process watches it; waits for the polls of a keeper that has ended."""
    import ray

    from headrace_cluster.ray import names as ray_names

    deadline = time.monotonic() + TAKE_SECONDS
    while (actor := ray_names.find_actor(naming.CONTROLLER, cluster)) is not None:
        try:
            if not ray.get(actor.is_watched.remote(), timeout=VIEW_SECONDS):
                return False
        except ray.exceptions.RayError:
            return False  # it has ended, or it does not answer: a keeper would replace it, too
        if time.monotonic() > deadline:
            return True
        time.sleep(POLL_SECONDS)
    return False

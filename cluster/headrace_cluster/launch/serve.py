"""`headrace serve` and `headrace controller`: start in order, watch, stop in order."""

import contextlib
import os
import threading
import time
from collections.abc import Callable

from headrace_cluster.core.rank_config import REPLICA_CLASS
from headrace_cluster.core.revisions import moved_note, resolved_revisions
from headrace_cluster.core.view import ControllerArgs
from headrace_cluster.launch.banner import attached_note, banner, starting
from headrace_cluster.launch.controller_watch import JOIN_SECONDS, ControllerWatch
from headrace_cluster.launch.display import (
    log_unexpected,
    restore_cursor,
    show_message,
    start_display,
    use_log_format,
)
from headrace_cluster.launch.router_group import RouterGroup
from headrace_cluster.launch.running_cluster import RunningCluster
from headrace_cluster.launch.server_record import ServerRecord, kept_secret
from headrace_cluster.launch.signals import StopSignals
from headrace_cluster.launch.start_checks import check_start
from headrace_cluster.local.cleanup import Cleanup
from headrace_cluster.local.run_logs import RunFolder, log_path
from headrace_cluster.local.secret_file import ClusterSecrets
from headrace_cluster.local.sockets import exposed_note, listeners
from headrace_cluster.program import program_name
from headrace_cluster.ray import local_ray
from headrace_cluster.ray.connection import RayConnection, connect, open_cleanup
from headrace_cluster.ray.controller_handle import ControllerHandle
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_cluster.spec.key_rules import KeyRules
from headrace_proto.address import port_of
from headrace_proto.errors import HeadraceError
from headrace_proto.logs import LogConfig, add_log_file

START_STOP_SECONDS = 3.0  # from a signal during the start to the end of all processes, by force if necessary
CLOSE_SECONDS = 4.0  # from the end of the last request to the end of all processes, by force if necessary
ABORT_SECONDS = 1.0  # for routers to end requests in flight with an error after a second signal


class Serve:
    """Runs one cluster and owns its processes. `run` blocks in the main thread."""

    def __init__(self, spec: ClusterSpec, *, with_router: bool = True, replica_class: str = REPLICA_CLASS) -> None:
        self._spec = spec
        self._with_router = with_router
        self._replica_class = replica_class
        self._began = time.monotonic()
        self._secrets = ClusterSecrets(spec.control.secret_file or kept_secret(spec))
        self._record = ServerRecord(spec, with_router=with_router)
        self._signals = StopSignals(self._force, START_STOP_SECONDS)
        self._forced_ends: list[Callable[[], None]] = []  # of each phase, in the order of the start; for `_force`
        self._run_folder = contextlib.ExitStack()  # closes the folder of this run, once Ray's logs are in it
        self._cleanup: Cleanup | None = None
        self._ray: RayConnection | None = None
        self._controller: ControllerWatch | None = None
        self._cluster: RunningCluster | None = None
        self._failure: Exception | None = None  # which ends this process
        self._exit_lock = threading.Lock()  # acquired by the thread that ends this process, never released

    def run(self) -> int:
        """Runs until a stop is requested; returns the exit status. Raises HeadraceError after a permanent failure.

        0 after an orderly stop, 128 + the signal's number when a signal ended the start before any replica was ready,
        or shortened the stop.
        """
        use_log_format(self._spec.logs.format)
        try:
            self._signals.install()
            with self._run_folder, open_cleanup(self._spec) as cleanup, contextlib.ExitStack() as stack:
                self._cleanup = cleanup
                self._forced_ends.append(cleanup.force)
                self._run_phases(cleanup, stack)
        except KeyboardInterrupt:
            self._exit_lock.acquire()
            show_message(self._ended)
            os._exit(self._signals.status)  # skips Ray's exit handlers, which would wait for ended processes
        except HeadraceError as error:
            self._show_log_folder()
            if not local_ray.is_connected():
                raise
            self._show_failure(error)
            os._exit(1)
        except Exception as error:
            self._show_failure(error)
            self._show_log_folder()
            if local_ray.is_connected():
                os._exit(1)
            return 1
        self._exit_lock.acquire()
        show_message(self._ended)
        if local_ray.is_connected():
            os._exit(0)
        return 0

    @property
    def _destroys(self) -> bool:
        return self._ray is None or self._ray.destroys

    @property
    def _ended(self) -> str:
        """The last message."""
        if self._destroys:
            return "stopped"
        return f"ended; the cluster goes on: the same command attaches to it, `{program_name()} stop` ends it"

    def _choose_end(self) -> None:
        """A stop begins: whether the cluster ends with this process, or goes on without it."""
        if self._ray is not None and self._signals.stops_all:
            self._ray.stop_requested = True
        if not self._destroys and self._cleanup is not None and not self._record.state.starting:
            self._cleanup.keep_files()  # for `headrace stop` and for the process that attaches next

    def _run_phases(self, cleanup: Cleanup, stack: contextlib.ExitStack) -> None:
        """stack: gets the end of each phase."""
        try:
            cluster = self._start(cleanup, stack)
            self._show_ready(cluster)
            cluster.watch(self._signals.requested)
        except KeyboardInterrupt:
            if not self._signals.serving:
                raise  # it ends the start; otherwise it requests a stop
        except Exception as error:
            self._failure = error
            raise
        finally:
            self._signals.enter_stop()
            if self._controller is not None:
                self._controller.end()
            self._choose_end()
            self._show_stop()

    def _show_stop(self) -> None:
        if self._signals.serving and self._cluster is not None:
            how = "stopping" if self._destroys else "detaching"
            note = self._cluster.drain_note(self._spec.routers.shutdown_seconds)
            show_message(f"{how}{note}; once more to stop at once")
        elif self._signals.number:
            show_message("stopping")

    # -- up ---------------------------------------------------------------------------------------------------

    def _start(self, cleanup: Cleanup, stack: contextlib.ExitStack) -> RunningCluster:
        show_message(starting(self._spec.models))
        self._record.save(cleanup)
        with start_display(self._spec.logs.format) as display:
            written = self._spec
            self._spec = check_start(
                written,
                lambda stage: display.update("model", stage, 0.0),
                lambda warning: show_message(warning, "warning"),
                with_router=self._with_router,
            )
            display.update("model", "checked", 1.0)
            address = self._spec.ray.address
            display.update("Ray", "starting" if address is None else f"joining {address}", 0.2)
            logs = self._run_folder.enter_context(contextlib.closing(self._open_logs()))
            ray = self._ray = stack.enter_context(connect(self._spec, cleanup, logs.path))
            display.update("Ray", "up; starting the controller", 0.8)
            controller = stack.enter_context(self._open_handle(written, ray, logs))
            self._forced_ends.append(ray.force_end)
            opened = controller.open()
            display.update("Ray", "up", 1.0)
            if note := attached_note(opened):
                show_message(note)
            self._record.add_controller(opened, ray, self._secrets, cleanup)
            watch = self._controller = ControllerWatch(controller)
            stack.push(lambda _kind, error, _trace: _end_watch(watch, ray, error))
            stack.callback(self._limit_close)  # once the routers have ended
            routers = self._start_routers(ray, logs, stack) if self._with_router else None
            cluster = self._cluster = RunningCluster(ray, watch, routers, self._secrets)
            cluster.await_ready(display, self._record, self._signals.enter_serving)
            return cluster

    def _open_logs(self) -> RunFolder:
        """Creates the folder of this run; this process logs there from now on. Raises StateError."""
        logs = RunFolder(self._spec.cluster, self._spec.admin.port)
        add_log_file(LogConfig("serve", path=str(log_path(logs.path, "serve")), format=self._spec.logs.format))
        show_message(f"logs: {logs.path}")
        self._record.add_logs(logs.path)
        return logs

    def _open_handle(self, written: ClusterSpec, ray: RayConnection, logs: RunFolder) -> ControllerHandle:
        args, key = self._controller_args(ray, logs), self._record.state.admin_key
        found = resolved_revisions(written, self._spec)
        handle = ControllerHandle(self._spec, args, self._secrets, key, ray, found)
        for name, now in found.items():
            if note := moved_note(now, handle.revisions[name]):
                show_message(note, "warning")
        return handle

    def _controller_args(self, ray: RayConnection, logs: RunFolder) -> ControllerArgs:
        return ControllerArgs(
            spec=self._spec.model_dump_json(exclude={"auth"}),
            program=program_name(),
            loopback=ray.link.owned,
            replica_class=self._replica_class,
            log_folder=str(logs.path),
        )

    def _start_routers(self, ray: RayConnection, logs: RunFolder, stack: contextlib.ExitStack) -> RouterGroup:
        routers = RouterGroup(self._spec, self._record.state.control_address, self._secrets, logs.path)
        stack.callback(routers.stop, abort=lambda: ray.lost_replicas)
        self._forced_ends.append(lambda: routers.abort_requests(ABORT_SECONDS))
        routers.start()
        return routers

    def _show_ready(self, cluster: RunningCluster) -> None:
        view, server, logs = cluster.view, self._record.state, self._spec.logs
        assert view is not None  # it is ready
        seconds = time.monotonic() - self._began
        shown = banner(server, view.started, view.roles, seconds, keys=KeyRules.of(self._spec), verbose=logs.verbose)
        shown.show(logs.format)
        own_ports = {port_of(server.control_address), server.admin_port}
        routers, joined = {place.pid for place in cluster.places}, self._spec.ray.address is not None
        if note := exposed_note(listeners(os.getpid()), routers, own_ports, joined=joined):
            show_message(note, "warning")

    # -- down -------------------------------------------------------------------------------------------------

    def _limit_close(self) -> None:
        if self._signals.serving:
            self._signals.force_within(CLOSE_SECONDS)

    def _force(self) -> None:
        """Ends the process from the thread that reads signals, whatever the main thread does."""
        if not self._exit_lock.acquire(blocking=False):
            return  # the main thread is ending the process already
        if self._signals.repeated:
            show_message("stopping at once")
        for force_end in reversed(self._forced_ends):
            force_end()
        restore_cursor()
        if self._failure is not None and not self._signals.repeated:
            self._show_log_folder()
            self._show_failure(self._failure)
            os._exit(1)
        show_message(self._ended)
        os._exit(0 if self._signals.serving and not self._signals.repeated else self._signals.status)

    def _show_failure(self, error: Exception) -> None:
        if isinstance(error, HeadraceError):
            show_message(str(error), "error")
        else:
            log_unexpected(error)

    def _show_log_folder(self) -> None:
        if folder := self._record.state.log_folder:
            show_message(f"logs: {folder}")


def _end_watch(watch: ControllerWatch, ray: RayConnection, error: BaseException | None) -> None:
    """Before the controller is ended. The thread may wait for Ray's GCS: it is waited for only when that helps."""
    ray.blocked = not watch.stop(JOIN_SECONDS if ray.ends_in_order(error) else 0.0)

"""`headrace serve`: start in order, watch, stop in order."""

import contextlib
import os
import threading
import time
from functools import partial
from pathlib import Path

from headrace_base.errors import ListenError, counted
from headrace_base.logs import LogConfig, add_log_file
from headrace_cluster.controller.spec_file import digest
from headrace_cluster.core.rank_config import REPLICA_CLASS
from headrace_cluster.core.view import ClusterView, ControllerConfig
from headrace_cluster.errors import ReplicaFailedError, SpecError
from headrace_cluster.launch.banner import show_ready, starting
from headrace_cluster.launch.controller_process import ControllerProcess
from headrace_cluster.launch.display import ClusterDisplay, show_failure, show_message, use_log_format
from headrace_cluster.launch.routers import RouterGroup, reachable_address
from headrace_cluster.launch.server_record import ServerRecord
from headrace_cluster.launch.signals import StopSignals
from headrace_cluster.launch.start_checks import check_start
from headrace_cluster.local import state
from headrace_cluster.local.child_guard import ChildGuard
from headrace_cluster.local.run_logs import log_path, make_run_folder
from headrace_cluster.program import program_name
from headrace_cluster.ray.local_ray import LOCALHOST, LocalRay, make_temp_dir
from headrace_cluster.spec.cluster_spec import ClusterSpec

CLOSE_SECONDS = 4.0  # from the end of the last request to the end of all processes, by force if necessary
START_SECONDS = 0.3  # between two rounds of a cluster that starts
WATCH_SECONDS = 0.5  # pause between two rounds of a cluster that serves
UP_SECONDS = 0.2  # between two looks at whether the first controller is up
ABORT_SECONDS = 1.0  # for routers to end requests in flight with an error after a second signal


class RunningCluster:
    """What has been started, until a stop is requested. Nothing here waits for Ray, so that routers are restarted."""

    def __init__(
        self,
        ray: LocalRay,
        controller: ControllerProcess,
        routers: RouterGroup | None,
        record: ServerRecord,
        display: ClusterDisplay,
        spec_file: Path | None = None,
    ) -> None:
        """routers: none = they are started elsewhere. spec_file: that was read."""
        self.view: ClusterView | None = None  # the last one
        self._ray = ray
        self._controller = controller
        self._routers = routers
        self._record = record
        self._shown = display
        self._spec_file, self._content = spec_file, digest(spec_file) if spec_file is not None else b""

    def await_ready(self, signals: StopSignals) -> bool:
        """Waits until every replica and every router is ready; False if a stop is requested meanwhile.

        As soon as one replica is ready, clients may have requests in flight: a replica that waits for a place, or
        loads for long, keeps the others from nothing. Raises ReplicaFailedError when any replica cannot start while
        none is up; ChildFailedError when a router cannot while no client is served.
        """
        while not signals.requested.wait(START_SECONDS):
            view = self._supervise()
            if view is None:
                continue
            if view.stop_requested:
                return False
            unable = next(iter(view.unable.values()), "") if not view.started else ""
            if refusal := view.fatal or unable:
                raise ReplicaFailedError(refusal)
            self._shown.show_start(view)
            signals.serving = signals.serving or bool(view.started)
            if view.ready and (self._routers is None or self._routers.ready(view.routers)):
                return True
        return False

    def watch(self, stop_requested: threading.Event) -> None:
        """Runs until the event or an admin call requests a stop. Shows failures and recoveries."""
        while not stop_requested.wait(WATCH_SECONDS):
            view = self._supervise()
            if view is not None:
                self._shown.show_changes(view)
                self._look_at_spec_file()
                if view.stop_requested:
                    return

    def _look_at_spec_file(self) -> None:
        """Says once per change what uses it."""
        if self._spec_file is not None and (content := digest(self._spec_file)) != self._content:
            self._content = content
            show_message(
                f"{self._spec_file} has changed: `{program_name()} apply -f {self._spec_file}` rolls its models out; "
                "everything else takes effect with the next start"
            )

    def _supervise(self) -> ClusterView | None:
        """One round of what is done in every phase."""
        events = []
        if self._routers is not None:
            serving = self.view is not None and bool(self.view.started and self.view.routers)
            events += self._routers.watch(serving=serving)
        events.append(self._ray.check())
        view, event = self._controller.poll()
        for each in (*events, event):
            if each:
                show_message(each, "warning")
        if view is not None:
            self.view = view
            if self._routers is not None and (places := self._routers.places(view.routers)):
                self._record.update(metrics=tuple(reachable_address(place.metrics) for place in places))
        return view


class Serve:
    """Runs one cluster and owns its processes, Ray's included. `run` blocks in the main thread."""

    def __init__(
        self,
        spec: ClusterSpec,
        *,
        with_router: bool = True,
        replica_class: str = REPLICA_CLASS,
        spec_file: Path | None = None,
    ) -> None:
        """spec_file: of which the spec was read. Raises StateError, and SpecError for one of `headrace controller`."""
        if spec.ray.address is not None:
            command = program_name()
            raise SpecError(
                f"`{command} serve` starts a Ray of its own; in the one at {spec.ray.address} (ray.address), start "
                f"`{command} controller` and `{command} router`"
            )
        if not spec.logs.files:
            raise SpecError(
                "logs.files: off is for `headrace controller`; `serve` keeps the files of its last five runs"
            )
        self._spec = spec
        self._spec_file = spec_file
        self._with_router = with_router
        self._replica_class = replica_class
        self._began = time.monotonic()
        self._record = ServerRecord(spec, with_router=with_router)
        self._signals = StopSignals(self._force)
        self._routers: RouterGroup | None = None  # that have been started
        self._status = 0
        self._exit_lock = threading.Lock()  # acquired by the thread that ends this process, never released

    def run(self) -> int:
        """Runs until a stop is requested; returns the exit status.

        0 after an orderly stop, 1 after a permanent failure, which is shown. A signal before any replica was ready, or
        a second one, ends the process with 128 + its number.
        """
        use_log_format(self._spec.logs.format)
        ray_folder = make_temp_dir()
        with ChildGuard(ray_folder, self._record.path), contextlib.ExitStack() as stack:
            self._signals.install()
            self._record.save()
            try:
                self._serve(ray_folder, stack)
            except Exception as error:
                self._status = 1
                if self._record.state.log_folder:
                    show_message(f"logs: {self._record.state.log_folder}")
                show_failure(error)
        self._exit_lock.acquire()
        if not self._status:
            show_message("stopped")
        return self._status

    def _serve(self, ray_folder: Path, stack: contextlib.ExitStack) -> None:
        """stack: gets the end of each phase."""
        show_message(starting(self._spec.models))
        display = ClusterDisplay()
        display.show_stage("model", "checking its files")
        self._spec = check_start(self._spec, partial(show_message, level="warning"), with_router=self._with_router)
        display.show_stage("model", "checked")
        try:
            controller = stack.enter_context(ControllerProcess(self._spec, LOCALHOST))
            routers = RouterGroup(self._spec) if self._with_router else None
        except ListenError as error:
            others = [state.describe(server) for server in state.running() if server.pid != os.getpid()]
            hint = f"; running: {'; '.join(others)}: a second server needs --port, --grpc-port, --admin-port of its own"
            raise ListenError(f"{error}{hint if others else ''}") from error
        self._record.add_admin(controller.admin_port)
        if routers is not None:
            self._record.add_routers(routers.http_port, routers.grpc_port)
        logs = self._open_logs(controller.admin_port)
        display.show_stage("Ray", "starting")
        ray = LocalRay(self._spec, ray_folder, logs)
        stack.callback(ray.stop)
        stack.callback(controller.stop)  # before Ray: it would replace what ends
        display.show_stage("Ray", "up")
        self._start_controller(controller, ray, logs)
        while controller.poll()[0] is None:  # a router would warn that it reaches none
            ray.check()
            time.sleep(UP_SECONDS)
        stack.callback(self._limit_close)  # once the routers have ended
        if routers is not None:
            self._routers = routers
            stack.callback(routers.stop, abort=lambda: ray.lost)
            routers.start(controller.control_address, Path(self._record.state.secret_file), logs)
        cluster = RunningCluster(ray, controller, routers, self._record, display, self._spec_file)
        if cluster.await_ready(self._signals) and cluster.view is not None:
            show_ready(self._record.state, cluster.view, self._spec, time.monotonic() - self._began)
            cluster.watch(self._signals.requested)
        count = cluster.view.in_flight if cluster.view is not None else 0
        limit = f"; {counted(count, 'request')} in flight: up to {self._spec.routers.stop_seconds:g} s to finish"
        show_message(f"stopping{limit if count else ''}; once more to stop at once")

    def _open_logs(self, admin_port: int) -> Path:
        """Creates the folder of this run; this process logs there from now on. Raises StateError."""
        logs = make_run_folder(self._spec.cluster, admin_port)
        add_log_file(LogConfig("serve", path=str(log_path(logs, "serve")), format=self._spec.logs.format))
        show_message(f"logs: {logs}")
        self._record.update(log_folder=str(logs))  # `headrace logs` finds the folder while the server starts
        return logs

    def _start_controller(self, controller: ControllerProcess, ray: LocalRay, logs: Path) -> None:
        secret_file = self._spec.control.secret_file
        if secret_file is None:
            kept = any(model.kv_offload_dir for model in self._spec.models)  # the names of blocks on disk depend on it
            secret_file = (state.home() if kept else ray.folder) / "secret"
            if not (kept and secret_file.exists()):
                state.write_private(secret_file, f"{state.new_key()}\n")
        self._record.update(
            control_address=controller.control_address,
            secret_file=str(secret_file),
            ray_dashboard=ray.dashboard,
            ray_token_file=str(ray.token_file),
            starting=False,
        )
        joined = self._spec.ray.model_copy(update={"address": ray.address})
        controller.start(
            ControllerConfig(
                spec=controller.spec.model_copy(update={"ray": joined}).model_dump_json(exclude={"auth"}),
                admin_key=self._record.state.admin_key,
                secret_file=str(secret_file),
                log_folder=str(logs),
                replica_class=self._replica_class,
            )
        )

    def _limit_close(self) -> None:
        timer = threading.Timer(CLOSE_SECONDS, self._force)
        timer.daemon = True
        timer.start()

    def _force(self, number: int = 0) -> None:
        """Ends the process from another thread, whatever the main thread does; then the child guard ends the others.

        number: of the signal that requests it.
        """
        if not self._exit_lock.acquire(blocking=False):
            return  # the main thread is ending the process already
        if number and self._signals.serving and self._routers is not None:
            show_message("stopping at once")
            self._routers.abort_requests(ABORT_SECONDS)
        show_message("stopped")
        os._exit(128 + number if number else self._status)

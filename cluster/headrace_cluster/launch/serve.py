"""`headrace serve`: start in order, watch, stop in order."""

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from headrace_cluster.core.rank_config import REPLICA_CLASS
from headrace_cluster.core.view import ControllerConfig
from headrace_cluster.errors import SpecError
from headrace_cluster.launch.banner import banner, starting
from headrace_cluster.launch.controller_process import ControllerProcess
from headrace_cluster.launch.display import (
    log_unexpected,
    restore_cursor,
    show_message,
    start_display,
    use_log_format,
)
from headrace_cluster.launch.routers import RouterGroup
from headrace_cluster.launch.running_cluster import RunningCluster
from headrace_cluster.launch.server_record import ServerRecord
from headrace_cluster.launch.signals import StopSignals
from headrace_cluster.launch.start_checks import check_start
from headrace_cluster.local import state
from headrace_cluster.local.cleanup import Cleanup, GuardedCleanup
from headrace_cluster.local.run_logs import RunFolder, log_path
from headrace_cluster.program import program_name
from headrace_cluster.ray.local_ray import LOCALHOST, LocalRay, make_temp_dir
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_cluster.spec.key_rules import KeyRules
from headrace_proto.errors import HeadraceError
from headrace_proto.logs import LogConfig, add_log_file

START_STOP_SECONDS = 3.0  # from a signal during the start to the end of all processes, by force if necessary
CLOSE_SECONDS = 4.0  # from the end of the last request to the end of all processes, by force if necessary
UP_SECONDS = 0.2  # between two looks at whether the first controller is up
ABORT_SECONDS = 1.0  # for routers to end requests in flight with an error after a second signal


class Serve:
    """Runs one cluster and owns its processes, Ray's included. `run` blocks in the main thread."""

    def __init__(self, spec: ClusterSpec, *, with_router: bool = True, replica_class: str = REPLICA_CLASS) -> None:
        """Raises SpecError for a spec that is of `headrace controller`."""
        if spec.ray.address is not None:
            command = program_name()
            raise SpecError(
                f"`{command} serve` starts a Ray of its own; in the one at {spec.ray.address} (ray.address), start "
                f"`{command} controller` and `{command} router`"
            )
        self._spec = spec
        self._with_router = with_router
        self._replica_class = replica_class
        self._began = time.monotonic()
        self._record = ServerRecord(spec, with_router=with_router)
        self._signals = StopSignals(self._force, START_STOP_SECONDS)
        self._forced_ends: list[Callable[[], None]] = []  # of each phase, in the order of the start; for `_force`
        self._cluster: RunningCluster | None = None
        self._failure: Exception | None = None  # which ends this process
        self._exit_lock = threading.Lock()  # acquired by the thread that ends this process, never released

    def run(self) -> int:
        """Runs until a stop is requested; returns the exit status. Raises HeadraceError after a permanent failure.

        0 after an orderly stop, 128 + the signal's number when a signal ended the start before any replica was ready,
        or shortened the stop.
        """
        if not self._spec.logs.files:
            raise SpecError(
                "logs.files: off is for `headrace controller`; `serve` keeps the files of its last five runs"
            )
        use_log_format(self._spec.logs.format)
        try:
            self._signals.install()
            # The folder of this run closes once Ray's logs are in it.
            with contextlib.ExitStack() as folder, GuardedCleanup(make_temp_dir()) as cleanup:
                self._forced_ends.append(cleanup.force)
                with contextlib.ExitStack() as stack:
                    self._run_phases(cleanup, folder, stack)
        except KeyboardInterrupt:
            self._exit_lock.acquire()
            show_message("stopped")
            return self._signals.status
        except HeadraceError:
            self._show_log_folder()
            raise
        except Exception as error:
            log_unexpected(error)
            self._show_log_folder()
            return 1
        self._exit_lock.acquire()
        show_message("stopped")
        return 0

    def _run_phases(self, cleanup: GuardedCleanup, folder: contextlib.ExitStack, stack: contextlib.ExitStack) -> None:
        """stack: gets the end of each phase. folder: gets that of the folder of this run."""
        try:
            cluster = self._start(cleanup, folder, stack)
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
            self._show_stop()

    def _show_stop(self) -> None:
        if self._signals.serving and self._cluster is not None:
            note = self._cluster.drain_note(self._spec.routers.shutdown_seconds)
            show_message(f"stopping{note}; once more to stop at once")
        elif self._signals.number:
            show_message("stopping")

    # -- up ---------------------------------------------------------------------------------------------------

    def _start(
        self, cleanup: GuardedCleanup, folder: contextlib.ExitStack, stack: contextlib.ExitStack
    ) -> RunningCluster:
        show_message(starting(self._spec.models))
        self._record.save(cleanup)
        with start_display(self._spec.logs.format) as display:
            self._spec = check_start(
                self._spec,
                lambda stage: display.update("model", stage, 0.0),
                lambda warning: show_message(warning, "warning"),
                with_router=self._with_router,
            )
            display.update("model", "checked", 1.0)
            controller = stack.enter_context(ControllerProcess(self._spec, LOCALHOST))
            logs = folder.enter_context(contextlib.closing(self._open_logs(controller.admin_port))).path
            display.update("Ray", "starting", 0.2)
            ray = LocalRay(self._spec, cleanup, logs)
            stack.callback(ray.stop)
            stack.callback(controller.stop)  # before Ray: it would replace what ends
            display.update("Ray", "up", 1.0)
            self._start_controller(controller, ray, logs, cleanup)
            while controller.poll() is None:  # a router would warn that it reaches none
                ray.check()
                time.sleep(UP_SECONDS)
            stack.callback(self._limit_close)  # once the routers have ended
            routers = self._start_routers(controller, ray, logs, stack) if self._with_router else None
            cluster = self._cluster = RunningCluster(ray, controller, routers)
            cluster.await_ready(display, self._record, self._signals.enter_serving)
            return cluster

    def _open_logs(self, admin_port: int) -> RunFolder:
        """Creates the folder of this run; this process logs there from now on. Raises StateError."""
        logs = RunFolder(self._spec.cluster, admin_port)
        add_log_file(LogConfig("serve", path=str(log_path(logs.path, "serve")), format=self._spec.logs.format))
        show_message(f"logs: {logs.path}")
        self._record.add_logs(logs.path)
        return logs

    def _start_controller(self, controller: ControllerProcess, ray: LocalRay, logs: Path, cleanup: Cleanup) -> None:
        secret_file = self._spec.control.secret_file
        if secret_file is None:
            secret_file = state.home() / f"secret-{controller.admin_port}"
            state.write_private(secret_file, f"{state.new_key()}\n")
            cleanup.remove_at_end(secret_file)
        self._record.add_controller(
            controller.control_address, controller.admin_port, secret_file, cleanup, ray.dashboard, ray.token_file
        )
        joined = self._spec.ray.model_copy(update={"address": ray.address})
        controller.start(
            ControllerConfig(
                spec=controller.spec.model_copy(update={"ray": joined}).model_dump_json(exclude={"auth"}),
                admin_key=self._record.state.admin_key,
                secret_file=self._record.state.secret_file,
                log_folder=str(logs),
                replica_class=self._replica_class,
            )
        )

    def _start_routers(
        self, controller: ControllerProcess, ray: LocalRay, logs: Path, stack: contextlib.ExitStack
    ) -> RouterGroup:
        secret_file = Path(self._record.state.secret_file)
        routers = RouterGroup(self._spec, controller.control_address, secret_file, logs)
        stack.callback(routers.stop, abort=lambda: ray.lost)
        self._forced_ends.append(lambda: routers.abort_requests(ABORT_SECONDS))
        routers.start()
        return routers

    def _show_ready(self, cluster: RunningCluster) -> None:
        view, server, logs = cluster.view, self._record.state, self._spec.logs
        assert view is not None  # it is ready
        seconds = time.monotonic() - self._began
        shown = banner(server, view.started, view.roles, seconds, keys=KeyRules.of(self._spec), verbose=logs.verbose)
        shown.show(logs.format)

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
            if isinstance(self._failure, HeadraceError):
                show_message(str(self._failure), "error")
            else:
                log_unexpected(self._failure)
            os._exit(1)
        show_message("stopped")
        os._exit(0 if self._signals.serving and not self._signals.repeated else self._signals.status)

    def _show_log_folder(self) -> None:
        if folder := self._record.state.log_folder:
            show_message(f"logs: {folder}")

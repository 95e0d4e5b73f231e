"""`headrace serve` and `headrace controller`: start in order, watch, stop in order."""

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

from headrace_cluster.core.rank_config import REPLICA_CLASS
from headrace_cluster.core.view import BUILT_AGAIN, RouterPlace, View
from headrace_cluster.launch.banner import banner, starting
from headrace_cluster.launch.controller_monitor import ControllerMonitor
from headrace_cluster.launch.display import (
    StartDisplay,
    log_unexpected,
    restore_cursor,
    show_message,
    start_display,
    use_log_format,
)
from headrace_cluster.launch.router_group import RouterGroup, reachable_address
from headrace_cluster.launch.signals import StopSignals
from headrace_cluster.launch.start_checks import StartChecks
from headrace_cluster.local import state
from headrace_cluster.local.ports import reachable
from headrace_cluster.local.processes import ProcessId
from headrace_cluster.local.run_logs import save_server
from headrace_cluster.local.secret_file import read_or_generate
from headrace_cluster.local.sockets import exposed_note, listeners
from headrace_cluster.local.state import ServeState
from headrace_cluster.ray.session import ClusterSession
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_cluster.spec.key_rules import KeyRules
from headrace_proto.address import host_port, port_of
from headrace_proto.errors import HeadraceError
from headrace_proto.quantities import counted

POLL_SECONDS = 0.3  # between two polls of a starting cluster
WATCH_SECONDS = 0.5  # between two polls of a running one
START_STOP_SECONDS = 3.0  # from a signal during the start to the end of all processes, by force if necessary
CLOSE_SECONDS = 4.0  # from the end of the last request to the end of all processes, by force if necessary
ABORT_SECONDS = 1.0  # for routers to end requests in flight with an error after a second signal


class Serve:
    """Runs one cluster and owns its processes. `run` blocks in the main thread."""

    def __init__(self, spec: ClusterSpec, *, with_router: bool = True, replica_class: str = REPLICA_CLASS) -> None:
        self._spec = spec
        self._with_router = with_router
        self._began = time.monotonic()
        self._secret = read_or_generate(spec.control.secret_file)
        self._session = ClusterSession(spec, self._secret, replica_class)
        self._monitor = ControllerMonitor(self._session, show_message)
        self._routers: RouterGroup | None = None
        self._places: list[RouterPlace] = []  # of the routers, once they are known
        self._signals = StopSignals(self._force)
        self._signals.time_limit = START_STOP_SECONDS
        self._exit_lock = threading.Lock()  # acquired by the thread that ends this process, never released
        self._serving = False  # every replica was ready
        self._in_flight = 0  # requests, at the last poll
        self._state: ServeState | None = None
        self._checks = StartChecks(spec, with_router=with_router)

    def run(self) -> int:
        """Runs until a stop is requested; returns the exit status. Raises HeadraceError after a permanent failure.

        0 after an orderly stop, 128 + the signal's number when a signal ended the start, or shortened the stop.
        """
        use_log_format(self._spec.logs.format)
        try:
            self._signals.install()
            with self._session:
                try:
                    self._start()
                    self._watch()
                except KeyboardInterrupt:
                    if not self._serving:
                        raise
                finally:
                    self._stop()
        except KeyboardInterrupt:
            self._exit_lock.acquire()
            show_message("stopped")
            os._exit(self._signals.status)  # skips Ray's exit handlers, which would wait for ended processes
        except HeadraceError as error:
            self._show_log_folder()
            if not self._session.ray_killed:
                raise
            show_message(str(error), "error")
            os._exit(1)
        except Exception as error:
            log_unexpected(error)
            self._show_log_folder()
            if self._session.ray_killed:
                os._exit(1)
            return 1
        self._exit_lock.acquire()
        show_message("stopped")
        if self._session.ray_killed:
            os._exit(0)
        return 0

    # -- up ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        show_message(starting(self._spec.models))
        self._register()
        with start_display(self._spec.logs.format) as display:
            self._checks.run(
                lambda stage: display.update("model", stage, 0.0), lambda warning: show_message(warning, "warning")
            )
            display.update("model", "checked", 1.0)
            own = self._spec.ray.address is None
            display.update("Ray", "starting" if own else f"joining {self._spec.ray.address}", 0.2)
            show_message(f"logs: {self._session.open_logs()}")
            self._save_logs()
            self._session.connect()
            display.update("Ray", "up; starting the controller", 0.8)
            opened = self._session.open_controller()
            display.update("Ray", "up", 1.0)
            control = host_port(opened.control_host, opened.control_port)
            self._save(control)
            if self._with_router:
                self._routers = RouterGroup(self._spec, control, self._secret, self._log_folder)
                self._routers.start()
            view = self._await_ready(display)
        self._serving, self._signals.time_limit = True, None
        assert self._state is not None
        seconds = time.monotonic() - self._began
        keys, logs = KeyRules.of(self._spec), self._spec.logs
        shown = banner(self._state, view.started, view.roles, seconds, keys=keys, verbose=logs.verbose)
        shown.show(logs.format)
        ports = {self._session.opened.control_port, self._session.opened.admin_port}
        if note := exposed_note(listeners(os.getpid()), {place.pid for place in self._places}, ports):
            show_message(note, "warning")

    def _await_ready(self, display: StartDisplay) -> View:
        """Waits until every replica and every router is ready."""
        shown: set[str] = set()
        while True:
            self._session.check_ray()
            view = self._monitor.poll()
            if view is None:
                time.sleep(POLL_SECONDS)
                continue
            for entry in view.progress:
                display.update(entry.replica_id, entry.stage, entry.fraction)
                shown.add(entry.replica_id)
            for replica_id in view.started.keys() - {entry.replica_id for entry in view.progress}:
                display.update(replica_id, "ready", 1.0)
            if self._routers is None:
                if view.ready:
                    return view
            else:
                self._routers.watch(may_restart=False)
                self._places = self._routers.places(view.routers)
                if self._places:
                    self._save_routers()
                if view.ready and self._routers.ready(self._places):
                    return view
            time.sleep(POLL_SECONDS)

    def _register(self) -> None:
        """Saves the state by which client commands find this process; addresses are those of the spec."""
        process = ProcessId.of(os.getpid())
        assert process is not None
        routers = self._spec.routers
        host = reachable(routers.host)
        state.remove_stale()
        self._state = ServeState(
            pid=process.pid,
            started=process.started,
            cluster=self._spec.cluster,
            admin_url=f"http://{host_port(self._spec.admin.host, self._spec.admin.port)}",
            admin_key=self._session.admin_key,
            admin_port=self._spec.admin.port,
            http_url=f"http://{host_port(host, routers.port)}" if self._with_router else "",
            grpc_address=host_port(host, routers.grpc_port) if self._with_router else "",
            models=tuple(model.name for model in self._spec.models),
            since=int(time.time()),
            starting=True,
        )
        self._session.remove_at_end(state.save(self._state))

    def _save_logs(self) -> None:
        """`headrace logs` finds the folder while the server starts."""
        assert self._state is not None
        self._state = replace(self._state, log_folder=str(self._log_folder or ""))
        self._write(self._state)

    def _save(self, control: str) -> None:
        assert self._state is not None and self._session.link is not None
        opened, starting = self._session.opened, self._state
        self._state = replace(
            starting,
            admin_url=f"http://{host_port(self._spec.admin.host, opened.admin_port)}",
            admin_port=opened.admin_port,
            control_address=control,
            secret_file=str(self._secret_file(opened.admin_port)),
            ray_dashboard=self._session.link.dashboard,
            ray_token_file=str(self._session.token_file or ""),
            starting=False,
            shutdown_seconds=self._spec.routers.shutdown_seconds,
        )
        self._session.remove_at_end(self._write(self._state))
        state.path_of(starting).unlink(missing_ok=True)

    def _secret_file(self, admin_port: int) -> Path:
        """Where the secret can be read: routers that are started alone need it."""
        if self._spec.control.secret_file is not None:
            return self._spec.control.secret_file
        path = state.home() / f"secret-{admin_port}"
        state.write_private(path, self._secret.decode())
        self._session.remove_at_end(path)
        return path

    @property
    def _log_folder(self) -> Path | None:
        return self._session.logs.path if self._session.logs is not None else None

    def _show_log_folder(self) -> None:
        if self._log_folder is not None:
            show_message(f"logs: {self._log_folder}")

    def _save_routers(self) -> None:
        """Saves the first router's address, since routers share their ports, and the metrics address of each."""
        assert self._state is not None
        place, host = self._places[0], reachable(self._spec.routers.host)
        known = replace(
            self._state,
            http_url=f"http://{host_port(host, port_of(place.http))}",
            grpc_address=host_port(host, port_of(place.grpc)) if place.grpc else "",
            metrics=tuple(reachable_address(each.metrics) for each in self._places),
        )
        if known != self._state:
            self._state = known
            self._write(known)

    def _write(self, known: ServeState) -> Path:
        """Writes the state for client commands, and the part that is kept in the log folder after the end."""
        if self._log_folder is not None:
            save_server(self._log_folder, known)
        return state.save(known)

    # -- while it runs ----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Runs until a signal or an admin call requests a stop. Shows failures and recoveries."""
        reported: dict[str, str] = {}
        while not self._signals.requested.wait(WATCH_SECONDS):
            for event in self._routers.watch(may_restart=True) if self._routers is not None else ():
                show_message(event, "warning")
            self._session.check_ray()
            view = self._monitor.poll()
            if view is None:
                continue
            for replica_id, cause in view.failures.items():
                if _without_countdown(reported.get(replica_id, "")) != _without_countdown(cause):
                    show_message(cause, "info" if cause == BUILT_AGAIN else "warning", replica=replica_id)
            for replica_id in reported.keys() - view.failures.keys():
                show_message("ready again", replica=replica_id)
            reported = dict(view.failures)
            self._in_flight = view.in_flight
            if view.stop_requested:
                return

    # -- down -------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Stops the routers first: requests in flight finish. The session ends the rest."""
        self._signals.interrupting = False
        if self._serving:
            show_message(f"stopping{self._drain_note()}; once more to stop at once")
        elif self._signals.number:
            show_message("stopping")
        self._checks.close()
        if self._routers is not None:
            self._routers.stop(abort=lambda: not self._session.ray_alive)
        if self._serving:
            self._signals.force_within(CLOSE_SECONDS)

    def _drain_note(self) -> str:
        if not self._in_flight:
            return ""
        seconds = self._spec.routers.shutdown_seconds
        return f"; {counted(self._in_flight, 'request')} in flight: up to {seconds:g} s to finish"

    def _force(self) -> None:
        """Ends the process from the thread that reads signals, whatever the main thread does."""
        if not self._exit_lock.acquire(blocking=False):
            return  # the main thread is ending the process already
        if self._signals.repeated:
            show_message("stopping at once")
        if self._routers is not None:
            self._routers.abort_requests(ABORT_SECONDS)
        self._session.force_close()
        restore_cursor()
        show_message("stopped")
        os._exit(0 if self._serving and not self._signals.repeated else self._signals.status)


def _without_countdown(cause: str) -> str:
    return cause.partition("; next try in ")[0]

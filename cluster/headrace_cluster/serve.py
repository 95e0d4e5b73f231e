"""`headrace serve` and `headrace controller`: start in order, watch, stop in order."""

import os
import time
from dataclasses import replace
from pathlib import Path

from headrace_cluster import state
from headrace_cluster.banner import banner
from headrace_cluster.controller.view import RouterPlace, View
from headrace_cluster.controller_keeper import ControllerKeeper
from headrace_cluster.display import StartDisplay, say, start_display
from headrace_cluster.ports import check_free, host_port, reachable
from headrace_cluster.preflight import Preflight
from headrace_cluster.processes import ProcessId
from headrace_cluster.rank_config import REPLICA_CLASS
from headrace_cluster.router_group import RouterGroup, port_of
from headrace_cluster.secret_file import read_or_draw
from headrace_cluster.session import ClusterSession
from headrace_cluster.signals import StopSignals
from headrace_cluster.spec import ClusterSpec
from headrace_cluster.state import ServeState
from headrace_router.auth import check_exposure
from headrace_worker.model.source import resolve

LOOK_SECONDS = 0.3  # between two looks at a starting cluster
WATCH_SECONDS = 0.5  # between two looks at a running one


def check(spec: ClusterSpec, *, with_router: bool) -> None:
    """Finds in a second what would fail after a minute: exposure, ports, model sources. Raises HeadraceError."""
    ports: list[tuple[str, int, str]] = [(spec.admin.host, spec.admin.port, "--admin-port")]
    if with_router:
        check_exposure(spec.routers.host, spec.auth)
        spec.auth.load()
        ports += [
            (spec.routers.host, spec.routers.port, "--port"),
            (spec.routers.host, spec.routers.grpc_port, "--grpc-port"),
        ]
        if spec.routers.count > 1 and spec.routers.metrics_port:
            first = spec.routers.metrics_port
            own = range(first, first + spec.routers.count)
            ports += [(spec.routers.host, port, "routers.metrics_port") for port in own]
    for host, port, flag in ports:
        check_free(host, port, flag)
    for model in spec.models:
        resolve(model.source, model.load_format, model.revision)


class Serve:
    """One cluster, from the process that owns it. `run` blocks in the main thread."""

    def __init__(self, spec: ClusterSpec, *, with_router: bool = True, replica_class: str = REPLICA_CLASS) -> None:
        self._spec = spec
        self._with_router = with_router
        self._began = time.monotonic()
        self._secret = read_or_draw(spec.control.secret_file)
        self._session = ClusterSession(spec, self._secret, replica_class)
        self._keeper = ControllerKeeper(self._session, say)
        self._routers: RouterGroup | None = None
        self._places: list[RouterPlace] = []  # of the routers, when they are known
        self._signals = StopSignals(self._force)
        self._state: ServeState | None = None
        self._preflight = Preflight(())

    def run(self) -> int:
        """Until somebody asks for a stop: 0. Raises HeadraceError when something failed for good."""
        self._signals.install()
        try:
            with self._session:
                try:
                    self._start()
                    self._signals.interrupting = False
                    self._watch()
                finally:
                    self._stop()
        except KeyboardInterrupt:
            return 1  # stopped before it was ready
        say("stopped")
        return 0

    # -- up ---------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        with start_display() as display:
            display.update("model", "looking for its files", 0.0)
            check(self._spec, with_router=self._with_router)
            display.update("model", "found", 1.0)
            self._preflight = Preflight(self._spec.models)
            own = self._spec.ray.address is None
            display.update("Ray", "starting" if own else f"joining {self._spec.ray.address}", 0.2)
            with self._signals.deferred():  # a Ray that is half up cannot be left
                self._session.connect()
            display.update("Ray", "up; starting the controller", 0.8)
            self._preflight.finish()
            opened = self._session.open_controller()
            display.update("Ray", "up", 1.0)
            control = host_port(opened.control_host, opened.control_port)
            self._save(control)
            if self._with_router:
                self._routers = RouterGroup(self._spec, control, self._secret)
                self._routers.start()
            view = self._await_ready(display)
        assert self._state is not None
        seconds = time.monotonic() - self._began
        host = reachable(self._spec.routers.host)
        metrics = [host_port(host, port_of(place.metrics)) for place in self._places]
        auth = self._spec.auth.has_keys
        say(banner(self._state, view.started, view.roles, seconds, metrics=metrics, auth=auth))

    def _await_ready(self, display: StartDisplay) -> View:
        """Until every replica is ready and every router says so."""
        shown: set[str] = set()
        while True:
            view = self._keeper.look()
            if view is None:
                time.sleep(LOOK_SECONDS)
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
                    self._save_routers(self._places[0])
                if view.ready and self._routers.ready(self._places):
                    return view
            time.sleep(LOOK_SECONDS)

    def _save(self, control: str) -> None:
        process = ProcessId.of(os.getpid())
        assert process is not None and self._session.link is not None
        opened = self._session.opened
        self._state = ServeState(
            pid=process.pid,
            started=process.started,
            cluster=self._spec.cluster,
            admin_url=f"http://{host_port(self._spec.admin.host, opened.admin_port)}",
            admin_key=self._session.admin_key,
            admin_port=opened.admin_port,
            models=tuple(model.name for model in self._spec.models),
            control_address=control,
            secret_file=str(self._secret_file(opened.admin_port)),
            ray_dashboard=self._session.link.dashboard,
            ray_token_file=str(self._session.token_file or ""),
        )
        self._session.remove_at_end(state.save(self._state))

    def _secret_file(self, admin_port: int) -> Path:
        """Where the secret can be read: routers that are started alone need it."""
        if self._spec.control.secret_file is not None:
            return self._spec.control.secret_file
        path = state.home() / f"secret-{admin_port}"
        state.write_private(path, self._secret.decode())
        self._session.remove_at_end(path)
        return path

    def _save_routers(self, place: RouterPlace) -> None:
        """One place for all: they share their ports."""
        assert self._state is not None
        host = reachable(self._spec.routers.host)
        http_url = f"http://{host_port(host, port_of(place.http))}"
        if self._state.http_url == http_url:
            return
        grpc_address = host_port(host, port_of(place.grpc)) if place.grpc else ""
        self._state = replace(self._state, http_url=http_url, grpc_address=grpc_address)
        state.save(self._state)

    # -- meanwhile --------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Until a signal or an admin call asks for a stop. Says what fails and comes back."""
        told: dict[str, str] = {}
        while not self._signals.requested.wait(WATCH_SECONDS):
            for news in self._routers.watch(may_restart=True) if self._routers is not None else ():
                say(news)
            view = self._keeper.look()
            if view is None:
                continue
            for replica_id, cause in view.failures.items():
                if _lasting(told.get(replica_id, "")) != _lasting(cause):
                    say(f"{replica_id}: {cause}")
            for replica_id in told.keys() - view.failures.keys():
                say(f"{replica_id}: ready again")
            told = dict(view.failures)
            if view.stop_requested:
                return

    # -- down -------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """The routers first: they let requests in flight finish. The session ends the rest."""
        self._signals.interrupting = False
        if self._signals.requested.is_set():
            say("stopping; once more to stop at once")
        self._preflight.close()
        if self._routers is not None:
            self._routers.stop()

    def _force(self) -> None:
        say("stopping at once")
        self._session.force_close()
        os._exit(1)


def _lasting(cause: str) -> str:
    """A cause without the seconds that are counted down in it."""
    return cause.partition("; next try in ")[0]

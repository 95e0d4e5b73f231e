"""A cluster whose replicas and routers are ready, until a stop is requested."""

import threading
import time
from collections.abc import Iterable, Sequence

from headrace_cluster.core.view import BUILT_AGAIN, RouterPlace, View
from headrace_cluster.errors import ReplicaFailedError
from headrace_cluster.launch.controller_monitor import ControllerMonitor
from headrace_cluster.launch.display import StartDisplay, show_message
from headrace_cluster.launch.router_group import RouterGroup
from headrace_cluster.launch.server_record import ServerRecord
from headrace_cluster.local.secret_file import ClusterSecrets
from headrace_cluster.ray.connection import RayConnection
from headrace_proto.errors import HeadraceError
from headrace_proto.quantities import counted

POLL_SECONDS = 0.3  # between two polls of a starting cluster
WATCH_SECONDS = 0.5  # between two polls of a running one


class RunningCluster:
    """For one thread."""

    def __init__(
        self,
        ray: RayConnection,
        monitor: ControllerMonitor,
        routers: RouterGroup | None,
        view: View,
        places: Sequence[RouterPlace] = (),
    ) -> None:
        """routers: none = they are started elsewhere. view, places: with which the cluster became ready."""
        self.view = view
        self.places = places
        self._ray = ray
        self._monitor = monitor
        self._routers = routers
        self._secret_problem = ""

    def watch(self, stop_requested: threading.Event, secrets: ClusterSecrets) -> None:
        """Runs until the event or an admin call requests a stop. Shows failures and recoveries.

        secrets: are read again all the time; the controller and the next routers get what has changed.
        """
        reported: dict[str, str] = {}
        problems: dict[str, str] = {}
        while not stop_requested.wait(WATCH_SECONDS):
            if self._routers is not None:
                _warn(self._routers.watch(may_restart=True))
            _warn(self._ray.check())
            self._reread(secrets)
            view = self._monitor.poll()
            if view is None:
                continue
            self.view = view
            for replica_id, cause in view.failures.items():
                if _without_countdown(reported.get(replica_id, "")) != _without_countdown(cause):
                    show_message(cause, "info" if cause == BUILT_AGAIN else "warning", replica=replica_id)
            for replica_id in reported.keys() - view.failures.keys():
                show_message("ready again", replica=replica_id)
            reported = dict(view.failures)
            for label, problem in _by_label(view.problems).items():
                if label not in problems:
                    show_message(problem, "warning")
            problems = _by_label(view.problems)
            if view.stop_requested:
                self._ray.stop_requested = True
                return

    def _reread(self, secrets: ClusterSecrets) -> None:
        """The controller gets other ones with the next poll, and certifies every member again."""
        problem = ""
        try:
            if secrets.reread():
                show_message("the secret file has changed: every process gets another certificate")
        except HeadraceError as error:
            problem = str(error)
        if problem and problem != self._secret_problem:
            show_message(f"{problem}; the secrets from before stay valid", "warning")
        self._secret_problem = problem

    def drain_note(self, seconds: float) -> str:
        """For the message of a stop; empty without requests. seconds: for those in flight."""
        count = self.view.in_flight
        return f"; {counted(count, 'request')} in flight: up to {seconds:g} s to finish" if count else ""


def await_ready(
    ray: RayConnection,
    monitor: ControllerMonitor,
    routers: RouterGroup | None,
    display: StartDisplay,
    record: ServerRecord,
) -> RunningCluster:
    """Waits until every replica and every router is ready; shows the stages, and records the routers' addresses.

    Raises ReplicaFailedError when the cluster cannot start, and in a Ray of our own when any replica cannot.
    """
    while True:
        _warn(ray.check())
        view = monitor.poll()
        if view is None:
            time.sleep(POLL_SECONDS)
            continue
        if view.stop_requested:
            ray.stop_requested = True
            raise KeyboardInterrupt
        if refusal := view.fatal or (next(iter(view.unable.values()), "") if ray.link.owned else ""):
            raise ReplicaFailedError(refusal)
        for entry in view.progress:
            display.update(entry.replica_id, entry.stage, entry.fraction)
        for replica_id in view.started.keys() - {entry.replica_id for entry in view.progress}:
            display.update(replica_id, "ready", 1.0)
        if routers is None:
            if view.ready:
                return RunningCluster(ray, monitor, None, view)
        else:
            routers.watch(may_restart=False)
            places = routers.places(view.routers)
            if places:
                record.add_routers(places)
            if view.ready and routers.ready(places):
                return RunningCluster(ray, monitor, routers, view, places)
        time.sleep(POLL_SECONDS)


def _warn(events: Iterable[str]) -> None:
    for event in events:
        show_message(event, "warning")


def _without_countdown(cause: str) -> str:
    return cause.partition("; next try in ")[0]


def _by_label(problems: Sequence[str]) -> dict[str, str]:
    """Problems by what they are about: their number of failures grows."""
    return {problem.partition(" failed")[0]: problem for problem in problems}

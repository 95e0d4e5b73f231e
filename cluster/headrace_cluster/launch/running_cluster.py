"""A `serve` whose Ray, controller and routers have been started, until a stop is requested."""

import threading

from headrace_cluster.core.view import View
from headrace_cluster.errors import ReplicaFailedError
from headrace_cluster.launch.controller_process import ControllerProcess
from headrace_cluster.launch.display import ClusterDisplay, StartDisplay, show_message
from headrace_cluster.launch.routers import RouterGroup, reachable_address
from headrace_cluster.launch.server_record import ServerRecord
from headrace_cluster.launch.signals import StopSignals
from headrace_cluster.ray.local_ray import LocalRay

START_SECONDS = 0.3  # between two rounds of a cluster that starts
WATCH_SECONDS = 0.5  # of one that serves


class RunningCluster:
    """For one thread. Nothing here waits for Ray: routers are restarted whatever Ray does."""

    def __init__(
        self, ray: LocalRay, controller: ControllerProcess, routers: RouterGroup | None, record: ServerRecord
    ) -> None:
        """routers: none = they are started elsewhere."""
        self.view: View | None = None  # the last one
        self._ray = ray
        self._controller = controller
        self._routers = routers
        self._record = record
        self._shown = ClusterDisplay()

    def await_ready(self, display: StartDisplay, signals: StopSignals) -> bool:
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
            self._shown.show_start(view, display)
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
                if view.stop_requested:
                    return

    def _supervise(self) -> View | None:
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

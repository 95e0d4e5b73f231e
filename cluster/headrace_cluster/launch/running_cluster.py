"""A `serve` whose Ray, controller and routers have been started, until a stop is requested."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from headrace_cluster.core.view import RouterPlace, View
from headrace_cluster.errors import ReplicaFailedError
from headrace_cluster.launch.display import ClusterDisplay, StartDisplay, show_message
from headrace_cluster.launch.routers import RouterGroup
from headrace_cluster.launch.server_record import ServerRecord
from headrace_proto.quantities import counted

START_SECONDS = 0.3  # between two rounds of a cluster that starts
WATCH_SECONDS = 0.5  # of one that serves


class WatchedController(Protocol):
    """The part of a ControllerProcess that is used here."""

    def poll(self) -> View | None:
        """The newest view; None without one. Raises HeadraceError."""
        ...

    def messages(self) -> list[str]:
        """What happened since the last call."""
        ...


class WatchedRay(Protocol):
    """The part of a LocalRay that is used here."""

    def check(self) -> list[str]:
        """What happened since the last call. Raises HeadraceError."""
        ...


class RunningCluster:
    """For one thread. Nothing here waits for Ray: routers are restarted whatever Ray does."""

    def __init__(self, ray: WatchedRay, controller: WatchedController, routers: RouterGroup | None) -> None:
        """routers: none = they are started elsewhere."""
        self.view: View | None = None  # the last one
        self.places: Sequence[RouterPlace] = ()  # of the routers, once all have been listed
        self._ray = ray
        self._controller = controller
        self._routers = routers
        self._shown = ClusterDisplay()

    def await_ready(self, display: StartDisplay, record: ServerRecord, enter_serving: Callable[[], None]) -> None:
        """Waits until every replica and every router is ready; shows the stages, and records the routers' addresses.

        enter_serving: called as soon as clients may have requests in flight: a replica that waits for a place, or
        loads for long, keeps the others from nothing.
        Raises ReplicaFailedError when any replica cannot start while none is up; RouterFailedError when a router cannot
        while no client is served; KeyboardInterrupt when an operator requests a stop.
        """
        while not self._is_ready(display, record, enter_serving):
            time.sleep(START_SECONDS)

    def watch(self, stop_requested: threading.Event) -> None:
        """Runs until the event or an admin call requests a stop. Shows failures and recoveries."""
        while not stop_requested.wait(WATCH_SECONDS):
            view = self._supervise()
            if view is not None:
                self._shown.show_changes(view)
                if view.stop_requested:
                    return

    def drain_note(self, seconds: float) -> str:
        """For the message of a stop; empty without requests. seconds: for those in flight."""
        count = self.view.in_flight if self.view is not None else 0
        return f"; {counted(count, 'request')} in flight: up to {seconds:g} s to finish" if count else ""

    def _is_ready(self, display: StartDisplay, record: ServerRecord, enter_serving: Callable[[], None]) -> bool:
        view = self._supervise()
        if view is None:
            return False
        if view.stop_requested:
            raise KeyboardInterrupt
        unable = next(iter(view.unable.values()), "") if not view.started else ""
        if refusal := view.fatal or unable:
            raise ReplicaFailedError(refusal)
        self._shown.show_start(view, display)
        if view.started:
            enter_serving()
        if self._routers is None:
            return view.ready
        self.places = self._routers.places(view.routers)
        if self.places:
            record.add_routers(self.places)
        return view.ready and self._routers.ready(self.places)

    def _supervise(self) -> View | None:
        """One round of what is done in every phase."""
        if self._routers is not None:
            serving = self.view is not None and bool(self.view.started and self.view.routers)
            _warn(self._routers.watch(serving=serving))
        _warn(self._ray.check())
        try:
            view = self._controller.poll()
        finally:
            for message in self._controller.messages():
                show_message(message)
        self.view = view or self.view
        return view


def _warn(events: Iterable[str]) -> None:
    for event in events:
        show_message(event, "warning")

"""A cluster whose controller and routers have been started, until a stop is requested."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from headrace_cluster.core.view import BUILT_AGAIN, RouterPlace, View
from headrace_cluster.errors import ReplicaFailedError
from headrace_cluster.launch.controller_watch import WATCH_SECONDS
from headrace_cluster.launch.display import StartDisplay, show_message
from headrace_cluster.launch.router_group import RouterGroup
from headrace_cluster.launch.server_record import ServerRecord
from headrace_cluster.local.secret_file import ClusterSecrets
from headrace_cluster.ray.connection import RayConnection
from headrace_proto.errors import HeadraceError
from headrace_proto.quantities import counted

START_SECONDS = 0.3  # between two rounds of a cluster that starts


class WatchedController(Protocol):
    """The part of a ControllerWatch that is used here."""

    def poll(self) -> View | None:
        """The newest view, once; None without a newer one. Never waits. Raises HeadraceError."""
        ...

    def messages(self) -> list[str]:
        """What happened since the last call."""
        ...


class RunningCluster:
    """For one thread, which calls nothing of Ray that waits for its GCS: routers are restarted whatever Ray does."""

    def __init__(
        self,
        ray: RayConnection,
        controller: WatchedController,
        routers: RouterGroup | None,
        secrets: ClusterSecrets,
    ) -> None:
        """routers: none = they are started elsewhere.

        secrets: are read again all the time; the controller and the next routers get what has changed.
        """
        self.view: View | None = None  # the last one
        self.places: Sequence[RouterPlace] = ()  # of the routers, once all have been listed
        self._ray = ray
        self._controller = controller
        self._routers = routers
        self._secrets = secrets
        self._secret_problem = ""
        self._unable: set[str] = set()  # replicas, of the last view

    def await_ready(self, display: StartDisplay, record: ServerRecord, enter_serving: Callable[[], None]) -> None:
        """Waits until every replica and every router is ready; shows the stages, and records the routers' addresses.

        enter_serving: called as soon as clients may have requests in flight: a replica that waits for a place, or
        loads for long, keeps the others from nothing.
        Raises ReplicaFailedError when the cluster cannot start, and in a Ray of our own when any replica cannot while
        none is up; RouterFailedError when a router cannot while no client is served.
        """
        while not self._is_ready(display, record, enter_serving):
            time.sleep(START_SECONDS)

    def watch(self, stop_requested: threading.Event) -> None:
        """Runs until the event or an admin call requests a stop. Shows failures and recoveries."""
        reported: dict[str, str] = {}
        problems: dict[str, str] = {}
        while not stop_requested.wait(WATCH_SECONDS):
            view = self._supervise()
            if view is None:
                continue
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

    def drain_note(self, seconds: float) -> str:
        """For the message of a stop; empty without requests. seconds: for those in flight."""
        count = self.view.in_flight if self.view is not None else 0
        return f"; {counted(count, 'request')} in flight: up to {seconds:g} s to finish" if count else ""

    def _is_ready(self, display: StartDisplay, record: ServerRecord, enter_serving: Callable[[], None]) -> bool:
        view = self._supervise()
        if view is None:
            return False
        if view.stop_requested:
            self._ray.stop_requested = True
            raise KeyboardInterrupt
        unable = next(iter(view.unable.values()), "") if self._ray.link.owned and not view.started else ""
        if refusal := view.fatal or unable:
            raise ReplicaFailedError(refusal)
        for replica_id in view.unable.keys() - self._unable:
            show_message(view.unable[replica_id], "warning", replica=replica_id)
        self._unable = set(view.unable)
        for entry in view.progress:
            display.update(entry.replica_id, entry.stage, entry.fraction)
        for replica_id in view.started.keys() - {entry.replica_id for entry in view.progress}:
            display.update(replica_id, "ready", 1.0)
        if view.started:
            enter_serving()
        if self._routers is None:
            return view.ready
        self.places = self._routers.places(view.routers)
        if self.places:
            record.add_routers(self.places)
        return view.ready and self._routers.ready(self.places)

    def _supervise(self) -> View | None:
        """One round of what is done in every phase. The newest view, if there is another one since the last round."""
        if self._routers is not None:
            serving = self.view is not None and bool(self.view.started and self.view.routers)
            _warn(self._routers.watch(serving=serving))
        _warn(self._ray.check())
        self._reread()
        try:
            view = self._controller.poll()
        finally:
            for message in self._controller.messages():
                show_message(message)
        self.view = view or self.view
        return view

    def _reread(self) -> None:
        """The controller gets other ones with the next poll, and certifies every member again."""
        problem = ""
        try:
            if self._secrets.reread():
                show_message("the secret file has changed: every process gets another certificate")
        except HeadraceError as error:
            problem = str(error)
        if problem and problem != self._secret_problem:
            show_message(f"{problem}; the secrets from before stay valid", "warning")
        self._secret_problem = problem


def _warn(events: Iterable[str]) -> None:
    for event in events:
        show_message(event, "warning")


def _without_countdown(cause: str) -> str:
    return cause.partition("; next try in ")[0]


def _by_label(problems: Sequence[str]) -> dict[str, str]:
    """Problems by what they are about: their number of failures grows."""
    return {problem.partition(" failed")[0]: problem for problem in problems}

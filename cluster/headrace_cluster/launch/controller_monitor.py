"""Polls the controller and starts another one when it is lost; requests are served meanwhile."""

import time
from collections.abc import Callable
from typing import Protocol

from headrace_cluster.core.snapshot import ControllerSnapshot
from headrace_cluster.core.view import View
from headrace_cluster.errors import ControllerFailedError, ControllerLostError
from headrace_proto.errors import HeadraceError

RESTART_SECONDS = (0.0, 1.0, 2.0, 4.0, 8.0)  # delay before each attempt to start another one
WINDOW_SECONDS = 120.0  # earlier losses do not count


class MonitoredController(Protocol):
    """The part of a ControllerHandle that a monitor uses."""

    def view(self) -> View:
        """State of the cluster. Raises ControllerLostError."""
        ...

    def restart(self, snapshot: ControllerSnapshot | None) -> None:
        """Starts another controller. Raises HeadraceError."""
        ...


class ControllerMonitor:
    """For one thread. `poll` never waits for the next attempt: it is called repeatedly."""

    def __init__(
        self,
        controller: MonitoredController,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._controller = controller
        self._report = report
        self._clock = clock
        self._snapshot: ControllerSnapshot | None = None
        self._losses: list[float] = []
        self._restart_at: float | None = None  # time of the next attempt; None while a controller runs

    def poll(self) -> View | None:
        """State of the cluster; None while it has no controller.

        Raises ControllerFailedError once controllers end too often, and the cluster's errors that `view` raises.
        """
        if self._restart_at is not None:
            if self._clock() < self._restart_at:
                return None
            try:
                self._controller.restart(self._snapshot)
            except HeadraceError as error:
                self._record_loss(str(error))
                return None
            self._restart_at = None
            self._report("a new controller runs")
        try:
            view = self._controller.view()
        except ControllerLostError as error:
            self._record_loss(str(error))
            return None
        self._snapshot = view.snapshot
        return view

    def _record_loss(self, cause: str) -> None:
        now = self._clock()
        self._losses = [when for when in self._losses if now - when < WINDOW_SECONDS] + [now]
        if len(self._losses) > len(RESTART_SECONDS):
            raise ControllerFailedError(
                f"{cause}; that was the {len(self._losses)}th time in {WINDOW_SECONDS:g} s, so this cluster is ended"
            )
        delay = RESTART_SECONDS[len(self._losses) - 1]
        self._restart_at = now + delay
        soon = f"in {delay:g} s" if delay else "now"
        self._report(f"{cause}; starting another one {soon}, serving goes on")

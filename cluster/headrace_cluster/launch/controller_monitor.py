"""Polls the controller and starts another one when it is lost; requests are served meanwhile."""

import random
import time
from collections.abc import Callable
from typing import Protocol

import structlog

from headrace_cluster.core.backoff import Backoff
from headrace_cluster.core.view import View
from headrace_cluster.errors import ControllerTakenError
from headrace_proto.errors import HeadraceError

BACKOFF = Backoff(1.0, 30.0)  # between attempts to start another one; before the first attempt there is no pause
WINDOW_SECONDS = 120.0  # earlier losses do not count

log = structlog.get_logger(__name__)


class MonitoredController(Protocol):
    """The part of a ControllerHandle that a monitor uses."""

    def poll(self) -> View:
        """Sends the controller what has changed; returns the state of the cluster. Raises ControllerLostError."""
        ...

    def restart(self) -> None:
        """Starts another controller. Raises HeadraceError."""
        ...


class ControllerMonitor:
    """For one thread. `poll` never waits for the next attempt: it is called repeatedly.

    Attempts never end: without a controller the replicas are served, but no longer replaced.
    """

    def __init__(
        self,
        controller: MonitoredController,
        report: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[], float] = random.random,
    ) -> None:
        self._controller = controller
        self._report = report
        self._clock = clock
        self._random = random
        self._losses: list[float] = []
        self._restart_at: float | None = None  # time of the next attempt; None while a controller runs

    def poll(self) -> View | None:
        """State of the cluster; None while it has no controller. Raises ControllerTakenError."""
        if self._restart_at is not None:
            if self._clock() < self._restart_at:
                return None
            try:
                self._controller.restart()
            except ControllerTakenError:
                raise
            except Exception as error:
                self._record_loss(error)
                return None
            self._restart_at = None
            self._report("a new controller runs")
        try:
            return self._controller.poll()
        except Exception as error:
            self._record_loss(error)
            return None

    def _record_loss(self, error: Exception) -> None:
        if not isinstance(error, HeadraceError):
            log.error("the controller could not be reached", exc_info=error)
        now = self._clock()
        self._losses = [when for when in self._losses if now - when < WINDOW_SECONDS] + [now]
        earlier = len(self._losses) - 1
        delay = BACKOFF.seconds(earlier, self._random) if earlier else 0.0
        self._restart_at = now + delay
        soon = f"in {delay:.0f} s" if delay else "now"
        self._report(f"{str(error) or type(error).__name__}; starting another one {soon}, serving goes on")

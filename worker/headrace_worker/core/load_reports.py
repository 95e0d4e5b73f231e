"""What routers are informed of a replica's load: after its steps, and between two steps. Pure.

A report's load includes every request that was received until it is sent. What other routers have sent since the last
step ended is announced EARLY_SECONDS later, also during a step; a `ReportPacer` for each router decides on the rest.
"""

from headrace_worker.core.arrivals import Arrivals
from headrace_worker.core.engine import LoadSnapshot
from headrace_worker.core.report_pacer import ReportPacer, ReportState


class RouterReports:
    """Of one router."""

    def __init__(self, interval: float) -> None:
        """interval: seconds between two reports without tokens; 0 = one after each step."""
        self.pacer = ReportPacer(interval)
        self.submits = 0  # received from it
        self.passed = 0  # of these, to the step loop
        self.others = 0  # passed by other routers, when it was last informed of these between two steps


class LoadReports:
    """Of all connected routers."""

    def __init__(self, idle_tick: float) -> None:
        """idle_tick: seconds between two steps of a replica without work."""
        self.arrivals = Arrivals()  # passed to the step loop, and not included in the newest step's load
        self._idle_tick = idle_tick
        self._routers: dict[RouterReports, None] = {}
        self._announcing = False

    def connect(self, interval: float) -> RouterReports:
        """One more router. interval: as that of RouterReports."""
        router = RouterReports(interval)
        self._routers[router] = None
        return router

    def disconnect(self, router: RouterReports) -> None:
        """It gets no more reports; what it has sent was received."""
        self._routers.pop(router, None)

    def received(self, router: RouterReports, tokens: int | None) -> None:
        """A submit. tokens: that it will compute; None = it was refused, or is passed to the step loop later."""
        router.submits += 1
        if tokens is not None:
            self.passed(router, tokens)

    def passed(self, router: RouterReports, tokens: int) -> None:
        """A submit of this router was passed to the step loop. tokens: that it will compute."""
        router.passed += 1
        self.arrivals.add(tokens)

    def accepted(self, number: int) -> None:
        """A step has ended, whose load includes the first `number` requests that were passed to the step loop."""
        self.arrivals.take(number)

    def begin_announcement(self) -> bool:
        """After submits of a router. Whether `announcement` is to be called EARLY_SECONDS later."""
        if self._announcing or len(self._routers) < 2:
            return False
        self._announcing = True
        return True

    def announcement(self) -> list[RouterReports]:
        """Routers that are informed now, since others have sent something."""
        self._announcing = False
        informed = []
        for router in self._routers:
            others = self.arrivals.received - router.passed
            if others != router.others:
                router.others = others
                informed.append(router)
        return informed

    def state(self, router: RouterReports, load: LoadSnapshot, *, draining: bool) -> ReportState:
        """What its pacer decides by. load: of the newest step."""
        next_step = load.predicted_step if load.running or load.waiting else self._idle_tick
        return ReportState(next_step, router.submits, router.others, draining)

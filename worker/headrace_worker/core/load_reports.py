"""What routers are informed of a replica's load: after its steps, and between two steps. Pure.

A report's load includes every request that was received until it is sent. What other routers have sent since the last
step ended is announced EARLY_SECONDS later, also during a step; a `ReportPacer` for each router decides on the rest.
"""

from collections import deque
from dataclasses import dataclass

from headrace_proto.stall import stall_limit
from headrace_worker.core.engine import LoadSnapshot


class Arrivals:
    """Submits that were received and that the load of the newest step does not include, in the order of arrival.

    A step may take half a second. Other routers place by the load as well, so it includes these submits at once: with
    the tokens that the router of each expects to be computed.
    """

    def __init__(self) -> None:
        self.received = 0
        self.tokens = 0
        self._waiting: deque[tuple[int, int]] = deque()  # number, from 1, and tokens

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, tokens: int) -> None:
        """Another one was received."""
        self.received += 1
        self.tokens += tokens
        self._waiting.append((self.received, tokens))

    def take(self, number: int) -> None:
        """The step's load includes the first `number` of all that were received."""
        while self._waiting and self._waiting[0][0] <= number:
            self.tokens -= self._waiting.popleft()[1]

    def since(self, number: int) -> tuple[int, int]:
        """How many were received after the first `number` and are not included yet, and their tokens."""
        tokens = [tokens for each, tokens in self._waiting if each > number]
        return len(tokens), sum(tokens)


EARLY_SECONDS = 0.02  # after the last frame: a submit that the load now includes is reported


@dataclass(frozen=True, slots=True)
class ReportState:
    """What a frame reports that a router must know early."""

    next_step: float  # seconds until the next one ends, as predicted
    submits: int = 0  # submits received from the router, all included in the load
    others: int = 0  # submits of other routers, when this router was last informed of them between two steps
    draining: bool = False


class ReportPacer:
    """When one router gets a frame without tokens: as often as it has requested.

    Frames with tokens are sent in any case, and count as reports.

    The router adds the interval to the time after which it regards the replica as stalled: `due` keeps the time between
    two frames below the interval and the longest step that the last frame explains.
    """

    def __init__(self, interval: float = 0.0) -> None:
        """interval: seconds between two reports; 0 = one after each step."""
        self._interval = interval
        self._last: ReportState | None = None
        self._at = 0.0

    def due(self, state: ReportState, now: float) -> bool:
        """Whether a frame without tokens is sent after the step that has ended now."""
        last = self._last
        if last is None or (state.draining, state.others) != (last.draining, last.others):
            return True
        if stall_limit(state.next_step) > stall_limit(last.next_step):
            return True  # the last frame does not explain such a long step
        pause = self._interval if state.submits == last.submits else min(self._interval, EARLY_SECONDS)
        return now + state.next_step / 2 >= self._at + pause  # at the step that ends closest to that time

    def sent(self, state: ReportState, now: float) -> None:
        """A frame was sent, with tokens or without."""
        self._last, self._at = state, now


class RouterReportPacer:
    """What one router is informed of."""

    def __init__(self, interval: float) -> None:
        """interval: seconds between two reports without tokens; 0 = one after each step."""
        self.pacer = ReportPacer(interval)
        self.submits = 0  # submits received from the router
        self.passed = 0  # submits of the router that were passed to the step loop
        self.others = 0  # other routers' passed submits, when this router was last informed of them between two steps


class LoadReports:
    """What all connected routers are informed of."""

    def __init__(self, idle_tick: float) -> None:
        """idle_tick: seconds between two steps of a replica without work."""
        self.arrivals = Arrivals()  # passed to the step loop, and not included in the newest step's load
        self._idle_tick = idle_tick
        self._routers: dict[RouterReportPacer, None] = {}
        self._announcing = False

    def connect(self, interval: float) -> RouterReportPacer:
        """One more router. interval: as that of RouterReports."""
        router = RouterReportPacer(interval)
        self._routers[router] = None
        return router

    def disconnect(self, router: RouterReportPacer) -> None:
        """It gets no more reports; what it has sent was received."""
        self._routers.pop(router, None)

    def received(self, router: RouterReportPacer, tokens: int | None) -> None:
        """A submit. tokens: that it will compute; None = it was refused, or is passed to the step loop later."""
        router.submits += 1
        if tokens is not None:
            self.passed(router, tokens)

    def passed(self, router: RouterReportPacer, tokens: int) -> None:
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

    def announcement(self) -> list[RouterReportPacer]:
        """Routers that are informed now, since others have sent something."""
        self._announcing = False
        informed = []
        for router in self._routers:
            others = self.arrivals.received - router.passed
            if others != router.others:
                router.others = others
                informed.append(router)
        return informed

    def state(self, router: RouterReportPacer, load: LoadSnapshot, *, draining: bool) -> ReportState:
        """What its pacer decides by. load: of the newest step."""
        next_step = load.predicted_step if load.running or load.waiting else self._idle_tick
        return ReportState(next_step, router.submits, router.others, draining)

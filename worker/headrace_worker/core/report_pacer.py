"""When a replica sends a frame without tokens to a router: as often as the router has requested. Pure."""

from dataclasses import dataclass

from headrace_proto.stall import stall_limit

EARLY_SECONDS = 0.02  # after the last frame: a submit that the load now includes is reported


@dataclass(frozen=True, slots=True)
class ReportState:
    """What a frame reports that a router must know early."""

    next_step: float  # seconds until the next one ends, as predicted
    submits: int = 0  # of the router: the load includes all that were received
    others: int = 0  # of other routers, when this one was last informed of them between two steps
    draining: bool = False


class ReportPacer:
    """Of one router. The frames that have tokens are sent in any case, and count as reports.

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

"""Virtual time and the order of events. Only the schedule determines when an event happens."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heappop, heappush
from itertools import count


class Event:
    """A call that happens at its time, unless it is cancelled before."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        """No-op when it has happened."""
        self.call = None


class VirtualTime:
    """Seconds of virtual time, and the events to come; those of the same time happen in the order of their calls."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0  # that have happened
        self._heap: list[tuple[float, int, Event]] = []
        self._numbers = count()
        self._replaying = False

    def clock(self) -> float:
        return self.now

    @contextmanager
    def as_of(self, time: float) -> Iterator[None]:
        """For what happened then, and is done now; it begins no event, which would come too late."""
        now, self.now, self._replaying = self.now, time, True
        try:
            yield
        finally:
            self.now, self._replaying = now, False

    def at(self, time: float, call: Callable[[], None]) -> Event:
        """An event at that time, or now if it has passed."""
        if self._replaying:
            raise RuntimeError("an event cannot begin in the past")
        event = Event(call)
        heappush(self._heap, (max(time, self.now), next(self._numbers), event))
        return event

    def after(self, seconds: float, call: Callable[[], None]) -> Event:
        return self.at(self.now + seconds, call)

    def run(self, done: Callable[[], bool]) -> None:
        """Until it is done, or no event is left."""
        heap = self._heap
        while heap and not done():
            time, _, event = heappop(heap)
            call, event.call = event.call, None
            if call is not None:
                self.now = time
                self.events += 1
                call()

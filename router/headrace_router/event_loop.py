"""The event loop of a router: it handles a bounded number of I/O events per turn."""

import asyncio
import gc
import selectors

EVENTS_PER_TURN = 64


class BoundedSelector(selectors.DefaultSelector):
    """Returns some of many ready events at a time, in rotation; the others are still ready in the next turn.

    Thousands of connections that are opened or closed at once would otherwise be one long turn.
    """

    _start = 0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        events = super().select(timeout)
        if len(events) <= EVENTS_PER_TURN:
            return events
        start = self._start % len(events)
        self._start = start + EVENTS_PER_TURN
        return (events + events)[start : self._start]


def exempt_from_collection(*, collect: bool = True) -> None:
    """Call it when everything is loaded: a full garbage collection, a pause of the loop, skips what exists now.

    collect: removes unused objects before, which is such a pause itself.
    """
    if collect:
        gc.collect()
    gc.freeze()


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A loop with such a selector."""
    return asyncio.SelectorEventLoop(BoundedSelector())

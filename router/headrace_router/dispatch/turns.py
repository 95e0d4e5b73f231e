"""Calls that requests put off to a later turn of the event loop, in slices: no request holds it, whatever it costs."""

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable

SLICE_SECONDS = 0.002  # of the event loop, of all requests together


class Turns:
    """One call of each request in turn: those of a request with many choices do not delay the others' much."""

    def __init__(self) -> None:
        self._calls: OrderedDict[object, deque[list[Callable[[], None]]]] = OrderedDict()  # by request
        self._scheduled = False

    def soon(self, request: object, call: Callable[[], None]) -> Callable[[], None]:
        """Calls it after the current call has returned; the result cancels that. It must not raise."""
        entry = [call]
        self._calls.setdefault(request, deque()).append(entry)
        self._schedule()
        return entry.clear

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._scheduled = False
        end = time.perf_counter() + SLICE_SECONDS
        while self._calls:
            request, calls = self._calls.popitem(last=False)
            entry = calls.popleft()
            if calls:
                self._calls[request] = calls
            try:
                if entry:
                    entry.pop()()
            finally:
                if self._calls:
                    self._schedule()
            if time.perf_counter() >= end:
                break

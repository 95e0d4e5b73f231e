"""Requests ordered by deadline."""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from headrace_worker.core.request import Request


class Deadlines:
    """Requests in the order of their deadlines; requests without a deadline are not stored.

    Those that have ended are removed when they are first, or before the heap grows to twice what was left last time.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Request]] = []
        self._counter = 0
        self._clean_at = 64

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, request: Request) -> None:
        if request.deadline is None:
            return
        if len(self._heap) >= self._clean_at:
            self._heap = [entry for entry in self._heap if entry[2].finish is None]
            heapify(self._heap)
            self._clean_at = max(64, 2 * len(self._heap))
        self._counter += 1
        heappush(self._heap, (request.deadline, self._counter, request))

    def take_expired(self, now: float) -> Iterator[Request]:
        """Removes and yields the requests whose deadline has passed and that have not ended."""
        while self._heap and (self._heap[0][0] <= now or self._heap[0][2].finish is not None):
            request = heappop(self._heap)[2]
            if request.finish is None:
                yield request

"""Requests that wait for a row, in order of priority and arrival."""

from collections.abc import Iterator
from heapq import heappop, heappush

from headrace_worker.core.request import Request


class WaitingQueue:
    """A priority queue with removal. A preempted request keeps its arrival time and so is admitted first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, float, int, Request]] = []
        self._members: dict[int, tuple[Request, int]] = {}  # by id(), with its number of tokens when it was added
        self._counter = 0
        self.tokens = 0  # positions to compute, over all members

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return (request for request, _ in self._members.values())

    def push(self, request: Request) -> None:
        self._counter += 1
        heappush(self._heap, (request.priority, request.arrival, self._counter, request))
        self._members[id(request)] = (request, len(request.tokens))
        self.tokens += len(request.tokens)

    def peek(self) -> Request | None:
        while self._heap:
            request = self._heap[0][3]
            if id(request) in self._members:
                return request
            heappop(self._heap)
        return None

    def remove(self, request: Request) -> bool:
        """Removes a request; False when it is not waiting."""
        member = self._members.pop(id(request), None)
        if member is None:
            return False
        self.tokens -= member[1]
        while self._heap and id(self._heap[0][3]) not in self._members:
            heappop(self._heap)
        return True

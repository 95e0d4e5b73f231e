"""Submits that a replica has received and that the load of its newest step does not include: pure.

A step may take half a second. Other routers place by the load as well, so that it includes these at once: with the
tokens that the router of each expects to be computed for it.
"""

from collections import deque


class Arrivals:
    """In the order in which they were received."""

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

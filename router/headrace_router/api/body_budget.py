"""Bounds the bodies of all requests together, over HTTP and gRPC, from their first byte until they are tokenized."""

from headrace_router.core.errors import OverloadedError
from headrace_router.core.limits import Limits


class BodyBudget:
    """The bytes of bodies that are held now; one per router."""

    def __init__(self, limits: Limits) -> None:
        self.capacity = limits.total_body_bytes
        self.held = 0

    def share(self) -> "BodyShare":
        """The part of one request; empty at first."""
        return BodyShare(self)


class BodyShare:
    """The bytes of one body. They count until `release`."""

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._bytes = 0

    def add(self, size: int) -> None:
        """Counts more bytes. Raises OverloadedError when all bodies together are too large."""
        budget = self._budget
        if budget.held + size > budget.capacity:
            raise OverloadedError("Too many bodies are being read; try again in a moment.")
        budget.held += size
        self._bytes += size

    def release(self) -> None:
        """The body is no longer needed. Idempotent."""
        self._budget.held -= self._bytes
        self._bytes = 0

"""Bounds the bodies of all requests together, over HTTP and gRPC, from their first byte until they are tokenized."""

from collections import Counter

from headrace_router.core.errors import OverloadedError
from headrace_router.core.limits import Limits

RESERVE = 0.25  # of the capacity: is added for tenants that hold little


class BodyBudget:
    """The bytes of bodies that are held now; one per router.

    When all are used, a tenant that holds less than an equal part may still use the reserve: a flood of one tenant's
    bodies refuses no other one's.
    """

    def __init__(self, limits: Limits) -> None:
        self.capacity = limits.total_body_bytes
        self.held = 0
        self._held_by: Counter[str] = Counter()

    def share(self, tenant: str) -> "BodyShare":
        """The part of one request; empty at first."""
        return BodyShare(self, tenant)

    def change(self, tenant: str, size: int) -> None:
        self.held += size
        self._held_by[tenant] += size
        if not self._held_by[tenant]:
            del self._held_by[tenant]

    def has_room(self, tenant: str, size: int) -> bool:
        total, own = self.held + size, self._held_by[tenant] + size
        others = len(self._held_by.keys() - {tenant})
        in_reserve = others > 0 and own <= self.capacity // (others + 1)
        return total <= self.capacity or (in_reserve and total <= self.capacity + int(self.capacity * RESERVE))


class BodyShare:
    """The bytes of one body. They count until `release`."""

    def __init__(self, budget: BodyBudget, tenant: str) -> None:
        self._budget = budget
        self._tenant = tenant
        self._bytes = 0

    def add(self, size: int) -> None:
        """Counts more bytes. Raises OverloadedError when all bodies together are too large."""
        if not self._budget.has_room(self._tenant, size):
            raise OverloadedError("Too many bodies are being read; try again in a moment.")
        self._budget.change(self._tenant, size)
        self._bytes += size

    def release(self) -> None:
        """The body is no longer needed. Idempotent."""
        self._budget.change(self._tenant, -self._bytes)
        self._bytes = 0

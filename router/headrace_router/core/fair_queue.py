"""A bounded queue that serves tenants fairly: pure.

Start-time fair queueing (Goyal, Vin, Cheng, SIGCOMM 1996): an item starts, in virtual time, when the tenant's item
before it ends, and not before it came; the item that starts first is next. A tenant with much work delays its own only,
and pays for what it gets: not for items that are removed before.
"""

from collections import Counter, deque
from dataclasses import dataclass
from itertools import takewhile
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Entry(Generic[T]):
    arrival: float  # virtual
    cost: float
    item: T
    priority: int


class FairQueue(Generic[T]):
    """Items wait in the order in which their tenants get their equal shares; a tenant's own by priority and order."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._waiting: dict[str, deque[_Entry[T]]] = {}  # by tenant; none is empty
        self._ends: dict[str, float] = {}  # virtual, of the last item that was taken of each tenant
        self._now = 0.0  # virtual
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def add(self, tenant: str, cost: float, item: T, priority: int = 0) -> T | None:
        """Adds an item. Returns the one that has to be refused for it, which may be the item itself.

        cost: its share of what the queue waits for, in any unit. priority: smaller ones are taken first, of the same
        tenant. When the queue is full, the tenant with most items loses its last one.
        """
        refused: T | None = None
        if self._count >= self._capacity:
            longest = max(self._waiting, key=lambda name: len(self._waiting[name]), default=tenant)
            own = self._waiting.get(tenant)
            if len(own or ()) + 1 >= len(self._waiting.get(longest, ())):
                if own is None or own[-1].priority <= priority:
                    return item
                longest = tenant  # this item is its last one no more
            refused = self._waiting[longest][-1].item
            self.remove(longest, refused)
        waiting = self._waiting.setdefault(tenant, deque())
        before = sum(1 for _ in takewhile(lambda entry: entry.priority > priority, reversed(waiting)))
        waiting.insert(len(waiting) - before, _Entry(self._now, cost, item, priority))
        self._count += 1
        return refused

    def heads(self) -> dict[str, T]:
        """The next item of each tenant that waits, in their order."""
        return {tenant: self._waiting[tenant][0].item for tenant in sorted(self._waiting, key=self._start)}

    def take(self, tenant: str | None = None) -> T | None:
        """Removes the next item, of all or of a tenant that waits; None when there is none."""
        if not self._waiting:
            return None
        tenant = self._next() if tenant is None else tenant
        start, entry = self._start(tenant), self._waiting[tenant].popleft()
        self._forget(tenant)
        self._now = max(self._now, start)
        self._ends[tenant] = start + entry.cost
        if not self._count:
            self._ends.clear()  # no tenant waits, so none has used more than its share
        return entry.item

    def remove(self, tenant: str, item: T) -> bool:
        """Removes an item that no longer waits. Returns whether it did."""
        for entry in reversed(self._waiting.get(tenant, ())):
            if entry.item is item:
                self._waiting[tenant].remove(entry)
                self._forget(tenant)
                return True
        return False

    def _next(self) -> str:
        return min(self._waiting, key=self._start)

    def _start(self, tenant: str) -> float:
        """The start of the tenant's next item."""
        return max(self._waiting[tenant][0].arrival, self._ends.get(tenant, 0.0))

    def _forget(self, tenant: str) -> None:
        """After an item was removed."""
        self._count -= 1
        if not self._waiting[tenant]:
            del self._waiting[tenant]


class TenantSlots:
    """Slots for running choices. A tenant below its equal share may exceed the capacity, up to 2 × the capacity.

    A tenant without a slot may have the slots of one request even if its share is smaller. A tenant that is alone has
    at most the capacity.
    """

    def __init__(self, capacity: int) -> None:
        self.used = 0
        self._capacity = capacity
        self._held: Counter[str] = Counter()

    def fits(self, tenant: str, count: int, reserved: int = 0) -> bool:
        """Whether a tenant may have `count` more slots; `count` is at most the capacity.

        reserved: slots that a waiting request of another tenant needs. A tenant below its equal share may go first,
        where these slots stay free.
        """
        if not reserved and self.used + count <= self._capacity:
            return True
        return self.has_part(tenant, count) and self.used + reserved + count <= 2 * self._capacity

    def has_part(self, tenant: str, count: int) -> bool:
        """Whether `count` more slots are within the tenant's equal share; if not, its own requests must end first."""
        own = self._held[tenant]
        return not own or own + count <= self._capacity // len(self._held.keys() | {tenant})

    def take(self, tenant: str, count: int) -> None:
        self.used += count
        self._held[tenant] += count

    def release(self, tenant: str, count: int) -> None:
        self.used -= count
        self._held[tenant] -= count
        if not self._held[tenant]:
            del self._held[tenant]

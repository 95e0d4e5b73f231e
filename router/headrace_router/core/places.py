"""Places that tenants share, each request a number of them at once: pure."""

from collections import Counter


class Places:
    """Beyond the capacity, and up to twice of it, a tenant may have an equal part: no other one keeps it out.

    A tenant with none may have those of one request even if its part is smaller. Alone, it has the capacity at most.
    """

    def __init__(self, capacity: int) -> None:
        self.used = 0
        self._capacity = capacity
        self._held: Counter[str] = Counter()

    def fits(self, tenant: str, count: int, reserved: int = 0) -> bool:
        """Whether a tenant may have `count` more, at most the capacity.

        reserved: places for which a request of another tenant waits. Only equal parts may be used before it, and they
        leave room for it.
        """
        if not reserved and self.used + count <= self._capacity:
            return True
        return self.has_part(tenant, count) and self.used + reserved + count <= 2 * self._capacity

    def has_part(self, tenant: str, count: int) -> bool:
        """Whether `count` more are within the tenant's equal part; else they wait for its own requests to end."""
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

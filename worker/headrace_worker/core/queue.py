"""Requests that wait for a row, fair among tenants; of one tenant in order of priority and arrival."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


def has_room(capacity: int, count: int, own: int, tenants: int) -> bool:
    """Whether a queue with `count` requests of `tenants` takes one more of a tenant that has `own` requests in it.

    A tenant below its equal share may exceed the capacity, up to 2 × the capacity.
    """
    if count < capacity:
        return True
    return tenants > 0 and count < 2 * capacity and (not own or own < capacity // tenants)


def divide_budget(missing: Sequence[tuple[bytes, int]], budget: int, waiting: frozenset[bytes]) -> list[int]:
    """Positions to compute of each prompt: equal shares of the budget per tenant, in order within one.

    missing: tenant and missing positions of each prompt. What a tenant does not need is divided among the others.
    waiting: tenants whose shares remain in the budget, for requests that are not admitted yet.
    """
    needs: Counter[bytes] = Counter()
    for tenant, count in missing:
        needs[tenant] += count
    parts = len(needs.keys() | waiting)
    shares: dict[bytes, int] = {}
    for tenant in sorted(needs, key=lambda tenant: needs[tenant]):
        shares[tenant] = min(needs[tenant], -(-budget // parts))
        budget -= shares[tenant]
        parts -= 1
    counts: list[int] = []
    for tenant, count in missing:
        counts.append(min(count, shares[tenant]))
        shares[tenant] -= counts[-1]
    return counts


MAX_REMOVED = 16  # entries of removed requests that a heap may have, besides one for each member


@dataclass(slots=True)
class _TenantQueue:
    heap: list[tuple[int, float, int, Request]] = field(default_factory=list)
    count: int = 0  # members; the heap may also have removed ones


class WaitingQueue:
    """A priority queue per tenant. A preempted request keeps its arrival time and so is its tenant's first.

    Between tenants: the one that runs fewer requests, then the one that was served fewer tokens (virtual token
    counters: Sheng et al., OSDI 2024). Priorities do not count there, since clients choose them. When a tenant begins
    to wait, its count is raised to the lowest of the tenants that wait: it gains nothing from the time before.
    """

    def __init__(self, running: Mapping[bytes, int]) -> None:
        """running: requests per tenant that have a row, kept current by the caller."""
        self._running = running
        self._tenants: dict[bytes, _TenantQueue] = {}  # none is without members
        self._served: dict[bytes, int] = {}  # tokens; empty when no request waits
        self._members: dict[int, tuple[Request, int]] = {}  # by id(), with the tokens that each is expected to miss
        self._counter = 0
        self.tokens = 0  # positions that are expected to be computed, over all members

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Request]:
        return (request for request, _ in self._members.values())

    def has_room(self, tenant: bytes, capacity: int, elsewhere: Counter[bytes]) -> bool:
        """Whether one more of the tenant may wait. elsewhere: requests per tenant that wait outside of this queue."""
        queue = self._tenants.get(tenant)
        own = elsewhere[tenant] + (queue.count if queue is not None else 0)
        tenants = len(self._tenants.keys() | elsewhere.keys())
        return has_room(capacity, len(self._members) + elsewhere.total(), own, tenants)

    def push(self, request: Request) -> None:
        tenant = request.tenant_salt
        if tenant not in self._tenants:
            least = min((self._served[other] for other in self._tenants), default=0)
            self._served[tenant] = max(self._served.get(tenant, 0), least)
            self._tenants[tenant] = _TenantQueue()
        own = self._tenants[tenant]
        self._counter += 1
        heappush(own.heap, (request.priority, request.arrival, self._counter, request))
        own.count += 1
        cached = 0 if request.preemptions else request.expected_cached  # its blocks may be gone since
        missing = max(1, len(request.tokens) - cached)
        self._members[id(request)] = (request, missing)
        self.tokens += missing

    def peek(self) -> Request | None:
        """The request to admit next."""
        heads = [own.heap[0] for own in self._tenants.values() if own.heap]
        return min(heads, key=self._place)[3] if heads else None

    def set_aside(self, request: Request) -> None:
        """It stays a member, but is not admitted until it is restored. It is the one that `peek` returned."""
        heappop(self._tenants[request.tenant_salt].heap)
        self._drop_removed(self._tenants[request.tenant_salt])

    def restore(self, request: Request) -> None:
        """In its old place; no-op if it has left the queue."""
        if id(request) in self._members:
            self._counter += 1
            entry = (request.priority, request.arrival, self._counter, request)
            heappush(self._tenants[request.tenant_salt].heap, entry)

    def take(self, request: Request) -> None:
        """Removes a request that is admitted: its tenant is served."""
        if not request.preemptions:
            self._served[request.tenant_salt] += len(request.tokens)
        self.remove(request)

    def remove(self, request: Request) -> bool:
        """Removes a request; False when it is not waiting."""
        member = self._members.pop(id(request), None)
        if member is None:
            return False
        self.tokens -= member[1]
        tenant = request.tenant_salt
        own = self._tenants[tenant]
        own.count -= 1
        self._drop_removed(own)
        if len(own.heap) > 2 * own.count + MAX_REMOVED:
            own.heap = [entry for entry in own.heap if id(entry[3]) in self._members]
            heapify(own.heap)
        if not own.count:
            del self._tenants[tenant]
        if not self._members:
            self._served.clear()
        return True

    def _drop_removed(self, own: _TenantQueue) -> None:
        while own.heap and id(own.heap[0][3]) not in self._members:
            heappop(own.heap)

    def _place(self, head: tuple[int, float, int, Request]) -> tuple[int, int, float, int]:
        _, arrival, number, request = head
        tenant = request.tenant_salt
        return self._running.get(tenant, 0), self._served[tenant], arrival, number

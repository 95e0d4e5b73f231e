"""How many requests run, how many wait, and who is sent away (RELIABILITY I5, I7)."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from headrace_router.auth import Tenant
from headrace_router.errors import OverloadedError, QuotaError
from headrace_router.limits import Limits
from headrace_router.router_metrics import RouterMetrics


class ShuttingDownError(OverloadedError):
    """The router is going away."""

    code = "shutting_down"


class Admission:
    """A bounded number of requests runs; a bounded number waits, first come first served; the rest is refused."""

    def __init__(self, limits: Limits, metrics: RouterMetrics) -> None:
        self._limits = limits
        self._metrics = metrics
        self._running = 0
        self._per_tenant: Counter[str] = Counter()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.closed = False

    @property
    def running(self) -> int:
        return self._running

    @asynccontextmanager
    async def admit(self, tenant: Tenant) -> AsyncIterator[None]:
        """Holds a place while the request runs. Raises QuotaError or OverloadedError, at once or when time is up."""
        if self.closed:
            raise ShuttingDownError("This server is shutting down; send the request again.")
        limit = self._limits.max_concurrent_per_key
        if limit is not None and self._per_tenant[tenant.name] >= limit:
            raise QuotaError(f"This API key has {limit} requests running, its limit; wait for one to end.")
        self._per_tenant[tenant.name] += 1
        try:
            await self._take_place()
            self._metrics.in_flight.set(self._running)
            try:
                yield
            finally:
                self._leave()
                self._metrics.in_flight.set(self._running)
        finally:
            self._per_tenant[tenant.name] -= 1
            if not self._per_tenant[tenant.name]:
                del self._per_tenant[tenant.name]

    async def _take_place(self) -> None:
        if self._running < self._limits.max_concurrent_requests:
            self._running += 1
            return
        if len(self._waiting) >= self._limits.max_queued_requests:
            raise OverloadedError("Too many requests are running and waiting; try again in a moment.")
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(turn)
        self._metrics.waiting.set(len(self._waiting))
        try:
            async with asyncio.timeout(self._limits.queue_seconds):
                await turn
        except BaseException as error:
            if turn.done() and not turn.cancelled():
                self._leave()  # the place came at the very moment of giving up
            elif turn in self._waiting:
                self._waiting.remove(turn)
            if isinstance(error, TimeoutError):
                raise OverloadedError("The request waited too long for its turn; try again in a moment.") from None
            raise
        finally:
            self._metrics.waiting.set(len(self._waiting))

    def _leave(self) -> None:
        while self._waiting:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)  # the place changes hands: the number running stays
                return
        self._running -= 1

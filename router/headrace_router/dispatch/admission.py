"""Bounds the choices that run and the requests that wait, both fairly per tenant; refuses the others."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from headrace_base.errors import counted
from headrace_router.access.auth import Tenant
from headrace_router.core.errors import ApiError, OverloadedError, QuotaError
from headrace_router.core.fair_queue import FairQueue, TenantSlots
from headrace_router.core.limits import Limits
from headrace_router.dispatch.router_metrics import RouterMetrics


class ShuttingDownError(OverloadedError, code="shutting_down", grpc_code="UNAVAILABLE"):
    """The router is shutting down."""

    def __init__(self) -> None:
        super().__init__("The server is shutting down; send the request again.")


@dataclass(slots=True, eq=False)
class _Waiter:
    granted: "asyncio.Future[None]"
    choices: int


class Admission:
    """A bounded number of choices runs; a bounded number of requests waits in a fair queue; the rest is refused."""

    def __init__(self, limits: Limits, metrics: RouterMetrics) -> None:
        self._limits = limits
        self._metrics = metrics
        self._running = 0
        self._per_tenant: Counter[str] = Counter()
        self._slots = TenantSlots(limits.max_concurrent_requests)  # places for the choices of the requests that run
        self._waiting: FairQueue[_Waiter] = FairQueue(limits.max_queued_requests)
        self._fail_running: set[Callable[[ApiError], None]] = set()  # functions that fail the requests that run
        self._admitted = 0  # run or wait
        self._ended = False
        self._drained = asyncio.Event()
        self.leaving = False  # no further connection is accepted: other routers get them
        self.closed = False

    @property
    def running(self) -> int:
        return self._running

    @property
    def ending(self) -> bool:
        """Whether connections end after their next answer."""
        return self.leaving or self.closed

    def leave(self) -> None:
        """Requests on connections that are open are still served; each connection ends after its next answer."""
        self.leaving = True
        self._set_drained()

    def close(self) -> None:
        """Refuses new requests from now on; requests in flight continue."""
        self.closed = True
        self._set_drained()

    async def drained(self) -> None:
        """After `leave` or `close`: waits until no request is in flight, or `end_all` was called."""
        while self._admitted and not self._ended:
            self._drained.clear()
            await self._drained.wait()

    def _set_drained(self) -> None:
        if self.ending and not self._admitted:
            self._drained.set()

    def end_all(self) -> None:
        """Refuses new requests, and ends the requests in flight with ShuttingDownError."""
        self.closed = self._ended = True
        self._drained.set()
        while (waiter := self._waiting.take()) is not None:
            _refuse(waiter, ShuttingDownError())
        for fail in list(self._fail_running):
            fail(ShuttingDownError())

    @contextmanager
    def failed_on_shutdown(self, fail: Callable[[ApiError], None]) -> Iterator[None]:
        """Inside, `end_all` calls `fail`. Raises ShuttingDownError if `end_all` was called before."""
        if self._ended:
            raise ShuttingDownError
        self._fail_running.add(fail)
        try:
            yield
        finally:
            self._fail_running.discard(fail)

    @asynccontextmanager
    async def admit(self, tenant: Tenant, choices: int, priority: int = 0) -> AsyncIterator[None]:
        """Holds the places of a request's choices while it runs. Their number may not be checked yet.

        priority: of the tenant's requests that wait, the lowest is next.
        Raises QuotaError or OverloadedError, within `queue_seconds`.
        """
        choices = min(choices, self._limits.choices, self._limits.max_concurrent_requests)
        if self.closed:
            raise ShuttingDownError
        limit = self._limits.max_concurrent_per_key
        if limit is not None and self._per_tenant[tenant.name] >= limit:
            raise QuotaError(f"This API key has {counted(limit, 'request')} running, its limit; wait for one to end.")
        self._per_tenant[tenant.name] += 1
        self._admitted += 1
        try:
            await self._acquire(tenant, choices, priority)
            self._metrics.in_flight.set(self._running)
            try:
                yield
            finally:
                self._release(tenant, choices)
                self._metrics.in_flight.set(self._running)
        finally:
            self._admitted -= 1
            self._set_drained()
            self._per_tenant[tenant.name] -= 1
            if not self._per_tenant[tenant.name]:
                del self._per_tenant[tenant.name]

    async def _acquire(self, tenant: Tenant, choices: int, priority: int) -> None:
        waiter = _Waiter(asyncio.get_running_loop().create_future(), choices)
        if self._may_enter(tenant, choices):
            self._take(tenant.name, choices)
            return
        refused = self._waiting.add(tenant.name, choices, waiter, priority)
        if refused is not None:
            _refuse(refused, OverloadedError("Too many requests are running and waiting; try again in a moment."))
        self._grant()  # it may be before the one for which places are reserved
        self._metrics.waiting.set(len(self._waiting))
        try:
            async with asyncio.timeout(self._limits.queue_seconds):
                await waiter.granted
        except BaseException as error:
            granted = waiter.granted
            if not self._waiting.remove(tenant.name, waiter):
                if granted.done() and not granted.cancelled() and granted.exception() is None:
                    self._release(tenant, choices)  # they were granted at the same moment
            else:
                self._grant()  # it may have been the first one, too large for the free places
            if isinstance(error, TimeoutError):
                raise OverloadedError("The request waited too long in the queue; try again in a moment.") from None
            raise
        finally:
            self._metrics.waiting.set(len(self._waiting))

    def _may_enter(self, tenant: Tenant, choices: int) -> bool:
        """Whether a new request runs at once. Those of one tenant stay in the order of the queue."""
        heads = self._waiting.heads()
        reserved = next((w.choices for name, w in heads.items() if self._slots.has_part(name, w.choices)), 0)
        return tenant.name not in heads and self._slots.fits(tenant.name, choices, reserved)

    def _take(self, tenant: str, choices: int) -> None:
        self._running += 1
        self._slots.take(tenant, choices)

    def _release(self, tenant: Tenant, choices: int) -> None:
        self._running -= 1
        self._slots.release(tenant.name, choices)
        self._grant()

    def _grant(self) -> None:
        while (tenant := self._next()) is not None:
            waiter = self._waiting.take(tenant)
            assert waiter is not None
            if not waiter.granted.done():
                self._take(tenant, waiter.choices)
                waiter.granted.set_result(None)

    def _next(self) -> str | None:
        """The tenant whose first waiting request fits.

        Places are reserved for the first one that does not, unless it waits for its own tenant's requests.
        """
        reserved = 0
        for tenant, waiter in self._waiting.heads().items():
            if self._slots.fits(tenant, waiter.choices, reserved):
                return tenant
            if not reserved and self._slots.has_part(tenant, waiter.choices):
                reserved = waiter.choices
        return None


def _refuse(waiter: _Waiter, error: ApiError) -> None:
    if not waiter.granted.done():
        waiter.granted.set_exception(error)

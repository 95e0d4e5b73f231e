"""Bounds the requests that run and that wait, and refuses the others (docs/reliability.md I5, I7)."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

from headrace_proto.quantities import counted
from headrace_router.access.auth import Tenant
from headrace_router.core.errors import ApiError, OverloadedError, QuotaError
from headrace_router.core.limits import Limits
from headrace_router.dispatch.router_metrics import RouterMetrics


class ShuttingDownError(OverloadedError, code="shutting_down", grpc_code="UNAVAILABLE"):
    """The router is shutting down."""

    def __init__(self) -> None:
        super().__init__("The server is shutting down; send the request again.")


class Admission:
    """A bounded number of requests runs; a bounded number waits in a FIFO queue; the rest is refused."""

    def __init__(self, limits: Limits, metrics: RouterMetrics) -> None:
        self._limits = limits
        self._metrics = metrics
        self._running = 0
        self._per_tenant: Counter[str] = Counter()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._fail_running: set[Callable[[ApiError], None]] = set()  # of the requests that run
        self._admitted = 0  # run or wait
        self._ended = False
        self._drained = asyncio.Event()
        self.closed = False

    @property
    def running(self) -> int:
        return self._running

    def close(self) -> None:
        """Refuses new requests from now on; requests in flight continue."""
        self.closed = True
        if not self._admitted:
            self._drained.set()

    async def drained(self) -> None:
        """After `close`: waits until no request is in flight, or `end_all` was called."""
        await self._drained.wait()

    def end_all(self) -> None:
        """Refuses new requests, and ends the requests in flight with ShuttingDownError."""
        self.closed = self._ended = True
        self._drained.set()
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_exception(ShuttingDownError())
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
    async def admit(self, tenant: Tenant) -> AsyncIterator[None]:
        """Holds a slot while the request runs. Raises QuotaError or OverloadedError, within `queue_seconds`."""
        if self.closed:
            raise ShuttingDownError
        limit = self._limits.max_concurrent_per_key
        if limit is not None and self._per_tenant[tenant.name] >= limit:
            raise QuotaError(f"This API key has {counted(limit, 'request')} running, its limit; wait for one to end.")
        self._per_tenant[tenant.name] += 1
        self._admitted += 1
        try:
            await self._acquire_slot()
            self._metrics.in_flight.set(self._running)
            try:
                yield
            finally:
                self._release_slot()
                self._metrics.in_flight.set(self._running)
        finally:
            self._admitted -= 1
            if self.closed and not self._admitted:
                self._drained.set()
            self._per_tenant[tenant.name] -= 1
            if not self._per_tenant[tenant.name]:
                del self._per_tenant[tenant.name]

    async def _acquire_slot(self) -> None:
        if self._running < self._limits.max_concurrent_requests:
            self._running += 1
            return
        if len(self._waiting) >= self._limits.max_queued_requests:
            raise OverloadedError("Too many requests are running and waiting; try again in a moment.")
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(waiter)
        self._metrics.waiting.set(len(self._waiting))
        try:
            async with asyncio.timeout(self._limits.queue_seconds):
                await waiter
        except BaseException as error:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self._release_slot()  # the slot was granted at the same moment
            elif waiter in self._waiting:
                self._waiting.remove(waiter)
            if isinstance(error, TimeoutError):
                raise OverloadedError("The request waited too long in the queue; try again in a moment.") from None
            raise
        finally:
            self._metrics.waiting.set(len(self._waiting))

    def _release_slot(self) -> None:
        while self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)  # it gets this slot: the number of running requests stays the same
                return
        self._running -= 1

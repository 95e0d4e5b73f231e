"""Places of running choices: one tenant keeps no other one out, and a large request gets its turn."""

import asyncio
from contextlib import AsyncExitStack

from hypothesis import given
from hypothesis import strategies as st

from headrace_router.access.auth import Tenant
from headrace_router.core.fair_queue import TenantSlots
from headrace_router.core.limits import Limits
from headrace_router.dispatch.admission import Admission
from headrace_router.dispatch.router_metrics import RouterMetrics

A, B, C, D = (Tenant(name, b"") for name in "abcd")


def taken(places: TenantSlots, tenant: str, count: int, reserved: int = 0) -> int:
    """How many requests of `count` places a tenant gets when it sends them without end."""
    requests = 0
    while places.fits(tenant, count, reserved):
        places.take(tenant, count)
        requests += 1
    return requests


def test_alone_a_tenant_has_the_capacity() -> None:
    assert taken(TenantSlots(1024), "a", 128) == 8


def test_beside_one_that_has_everything_a_tenant_has_an_equal_part() -> None:
    places = TenantSlots(1024)
    taken(places, "a", 128)
    assert taken(places, "b", 1) == 512
    assert taken(places, "c", 1) == 341
    assert not places.fits("a", 1)


def test_a_tenant_with_nothing_may_have_one_request_that_is_larger_than_its_part() -> None:
    places = TenantSlots(8)
    for tenant in "abcd":
        places.take(tenant, 2)
    assert taken(places, "e", 4) == 1


def test_before_a_request_for_which_places_are_reserved_only_equal_parts_are_used() -> None:
    places = TenantSlots(16)
    places.take("a", 9)
    places.take("b", 3)
    assert taken(places, "b", 1, reserved=8) == 5


@given(
    st.integers(4, 12),
    st.lists(st.tuples(st.sampled_from("abcde"), st.integers(1, 4), st.booleans(), st.integers(0, 4))),
)
def test_there_is_a_bound_and_no_tenant_with_nothing_is_kept_out(
    capacity: int, steps: list[tuple[str, int, bool, int]]
) -> None:
    places = TenantSlots(capacity)
    held: list[tuple[str, int]] = []
    for tenant, count, enters, reserved in steps:
        if enters and places.fits(tenant, count, reserved):
            places.take(tenant, count)
            held.append((tenant, count))
        elif not enters and held:
            places.release(*held.pop(0))
        assert places.used == sum(size for _, size in held) <= 2 * capacity
        if places.used + 1 <= 2 * capacity and tenant not in dict(held):
            assert places.fits(tenant, 1)
    for one in held:
        places.release(*one)
    assert places.used == 0


class Requests:
    """Requests that run until they are ended, the oldest first."""

    def __init__(self, limits: Limits) -> None:
        self.admission = Admission(limits, RouterMetrics())
        self.running: list[AsyncExitStack] = []

    async def runs(self, tenant: Tenant, choices: int) -> bool:
        """Whether a request runs at once; one that would wait is cancelled."""
        stack = AsyncExitStack()
        entering = asyncio.create_task(stack.enter_async_context(self.admission.admit(tenant, choices)))
        await asyncio.sleep(0)
        if not entering.done():
            entering.cancel()
            return False
        self.running.append(stack)
        return True

    async def end_one(self) -> None:
        await self.running.pop(0).aclose()


def test_a_tenant_whose_requests_fill_all_places_keeps_no_other_one_waiting() -> None:
    async def run() -> None:
        requests = Requests(Limits())
        for _ in range(8):
            assert await requests.runs(A, 128)
        assert not await requests.runs(A, 1)
        assert await requests.runs(B, 1)
        assert await requests.runs(B, 128)

    asyncio.run(run())


def test_places_are_reserved_for_a_large_request_once_its_tenant_holds_nothing() -> None:
    async def run() -> None:
        requests = Requests(Limits(max_concurrent_requests=8))
        assert await requests.runs(A, 1)
        assert await requests.runs(B, 7)
        assert await requests.runs(C, 8)
        large = asyncio.create_task(requests.admission.admit(A, 8).__aenter__())
        await asyncio.sleep(0)
        await requests.end_one()
        assert not await requests.runs(D, 1)
        await requests.end_one()
        await asyncio.sleep(0)
        assert large.done()

    asyncio.run(run())


def test_requests_of_one_choice_do_not_starve_one_of_many() -> None:
    """Others send without end as theirs finish; the large one runs once its tenant holds nothing else."""

    async def run() -> None:
        requests = Requests(Limits(max_concurrent_requests=8, choices=8))
        assert await requests.runs(A, 8)
        large = asyncio.create_task(requests.admission.admit(A, 8).__aenter__())
        await asyncio.sleep(0)
        for _ in range(8):
            await requests.runs(B, 1)
            await requests.runs(C, 1)
        for _ in range(8):
            await requests.end_one()
            await requests.runs(B, 1)
            await requests.runs(C, 1)
        assert large.done()

    asyncio.run(run())

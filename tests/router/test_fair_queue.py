"""A tenant with much work delays its own, in the queue and at the tokenizer threads."""

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_router.access.auth import Tenant
from headrace_router.core.errors import InvalidRequestError, OverloadedError
from headrace_router.core.fair_queue import FairQueue
from headrace_router.core.limits import Limits
from headrace_router.dispatch.admission import Admission
from headrace_router.dispatch.router_metrics import RouterMetrics
from headrace_router.text.tokenizer_pool import LARGE, TokenizerPool


def test_a_tenant_that_comes_later_waits_for_no_queue_of_another() -> None:
    queue: FairQueue[str] = FairQueue(1000)
    for number in range(500):
        queue.add("flood", 1, f"f{number}")
    assert queue.take() == "f0"
    queue.add("other", 1, "o0")
    queue.add("other", 1, "o1")
    taken = [queue.take() for _ in range(5)]
    assert taken.index("o0") <= 1 and taken.index("o1") <= 3


def test_shares_are_of_cost_and_not_of_items() -> None:
    queue: FairQueue[str] = FairQueue(1000)
    for _ in range(100):
        queue.add("large", 10, "l")
        queue.add("small", 1, "s")
    taken = [queue.take() for _ in range(110)]
    assert taken.count("s") >= 95


def test_a_tenant_whose_items_expire_keeps_its_share() -> None:
    """More come in a second than are served, and each waits for two seconds at most."""
    queue: FairQueue[tuple[str, int]] = FairQueue(1000)
    served, waiting = {"few": 0, "many": 0}, list[tuple[int, tuple[str, int]]]()
    for tick in range(3000):  # a hundredth of a second
        for tenant, each in (("few", 4), ("many", 1)):
            if tick % each == 0:
                item = (tenant, tick)
                queue.add(tenant, 1, item)
                waiting.append((tick, item))
        while waiting and waiting[0][0] < tick - 200:
            _, item = waiting.pop(0)
            queue.remove(item[0], item)
        if tick % 5 == 0 and (taken := queue.take()) is not None:
            served[taken[0]] += 1
    assert min(served.values()) > 0.4 * sum(served.values()), served


def test_a_full_queue_refuses_the_tenant_that_fills_it() -> None:
    queue: FairQueue[str] = FairQueue(3)
    assert [queue.add("flood", 1, f"f{number}") for number in range(4)] == [None, None, None, "f3"]
    assert queue.add("other", 1, "o0") == "f2"
    assert queue.add("flood", 1, "f4") == "f4"
    assert [queue.take() for _ in range(4)] == ["f0", "o0", "f1", None]


def test_priorities_order_a_tenants_own_items() -> None:
    queue: FairQueue[str] = FairQueue(1000)
    for item, priority in (("a0", 0), ("a5", 5), ("a-1", -1), ("a0b", 0), ("a-9", -9)):
        queue.add("a", 1, item, priority)
    queue.add("b", 1, "b9", 9)
    queue.add("b", 1, "b8", 8)
    taken = [queue.take() for _ in range(7)]
    assert [item for item in taken if item in ("b8", "b9")] == ["b8", "b9"]
    assert [item for item in taken if item not in ("b8", "b9")] == ["a-9", "a-1", "a0", "a0b", "a5"]
    assert max(taken.index("b8"), taken.index("b9")) <= 3, "priorities take nothing from another tenant"


def test_a_full_queue_refuses_the_least_urgent_item_of_the_tenant_that_fills_it() -> None:
    queue: FairQueue[str] = FairQueue(2)
    assert [queue.add("a", 1, f"a{number}", number) for number in (3, 5)] == [None, None]
    assert queue.add("a", 1, "a5b", 5) == "a5b"
    assert queue.add("a", 1, "a4", 4) == "a5"
    assert queue.add("b", 1, "b9", 9) == "a4"
    assert queue.add("b", 1, "b0", 0) == "b9"
    assert sorted(filter(None, (queue.take() for _ in range(3)))) == ["a3", "b0"]


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.sampled_from(["add", "take", "remove"]))))
def test_every_item_leaves_once(steps: list[tuple[str, int, str]]) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue(5)
    waiting: list[tuple[str, int]] = []
    for number, (tenant, cost, action) in enumerate(steps):
        if action == "add":
            item = (tenant, number)
            waiting.append(item)
            refused = queue.add(tenant, cost, item, number * 7 % 3)
            if refused is not None:
                waiting.remove(refused)
        elif action == "take":
            taken = queue.take()
            assert (taken is None) is (not waiting)
            if taken is not None:
                waiting.remove(taken)
        else:
            found = next((item for item in waiting if item[0] == tenant), None)
            if found is not None:
                assert queue.remove(tenant, found)
                waiting.remove(found)
        assert len(queue) == len(waiting) <= 5


def test_a_flood_of_choices_delays_another_tenant_by_one_request() -> None:
    """One tenant has filled all places with requests of many choices, and has more of them in the queue."""

    async def run() -> list[str]:
        limits = Limits(max_concurrent_requests=8, choices=4)
        admission = Admission(limits, RouterMetrics())
        order: list[str] = []

        async def request(name: str, choices: int) -> None:
            async with admission.admit(Tenant(name, b""), choices):
                order.append(name)
                await asyncio.sleep(0.01)

        flood = [asyncio.create_task(request("flood", 4)) for _ in range(20)]
        await asyncio.sleep(0.005)
        assert order == ["flood"] * 2
        await asyncio.gather(*flood, *(request("other", 1) for _ in range(3)))
        assert not admission.running
        return order

    order = asyncio.run(run())
    assert "other" in order[2:5] and order.index("other", order.index("other") + 2) <= 8


def test_more_choices_than_may_run_are_no_obstacle() -> None:
    """A body with n = 10 ** 9 is refused after its admission: until then it must not wait for so many places."""

    async def run() -> None:
        admission = Admission(Limits(max_concurrent_requests=8), RouterMetrics())
        async with (
            asyncio.timeout(2),
            admission.admit(Tenant("a", b""), 1),
            admission.admit(Tenant("a", b""), 7),
        ):
            waiting = asyncio.create_task(admission.admit(Tenant("a", b""), 10**9).__aenter__())
            await asyncio.sleep(0.01)
            assert not waiting.done()
        await asyncio.wait_for(waiting, 2)

    asyncio.run(run())


@pytest.fixture
def blocked() -> Any:
    """Work that ends when the event is set."""
    event = threading.Event()
    yield event
    event.set()


def _limits(**values: Any) -> Limits:
    return Limits(**{"tokenize_threads": 2, "queue_seconds": 5.0} | values)


def _in_pool(limits: Limits, scenario: Callable[[TokenizerPool], Any]) -> Any:
    async def run() -> Any:
        pool = TokenizerPool(limits)
        try:
            return await scenario(pool)
        finally:
            pool.close()

    return asyncio.run(run())


def test_large_work_leaves_a_thread_to_small_work(blocked: threading.Event) -> None:
    async def scenario(pool: TokenizerPool) -> None:
        large = [asyncio.create_task(pool.run(blocked.wait, "flood", LARGE)) for _ in range(5)]
        await asyncio.sleep(0.05)
        assert await asyncio.wait_for(pool.run(lambda: 7, "flood", 10), 2) == 7
        assert await asyncio.wait_for(pool.run(lambda: 8, "other", 10), 2) == 8
        blocked.set()
        await asyncio.gather(*large)

    _in_pool(_limits(), scenario)


def test_time_in_the_queue_is_overload_and_no_error_of_the_request(blocked: threading.Event) -> None:
    async def scenario(pool: TokenizerPool) -> None:
        first = asyncio.create_task(pool.run(blocked.wait, "a", 1))
        await asyncio.sleep(0.05)
        with pytest.raises(OverloadedError, match="waited too long"):
            await pool.run(lambda: None, "a", 1)
        blocked.set()
        await first
        assert await pool.run(lambda: 1, "a", 1) == 1

    _in_pool(_limits(tokenize_threads=1, queue_seconds=0.1), scenario)


def test_work_that_takes_too_long_is_refused_and_keeps_its_thread(blocked: threading.Event) -> None:
    async def scenario(pool: TokenizerPool) -> None:
        with pytest.raises(InvalidRequestError, match="takes too long"):
            await pool.run(blocked.wait, "a", 1)
        waiting = asyncio.create_task(pool.run(lambda: 2, "a", 1))
        await asyncio.sleep(0.05)
        assert not waiting.done()
        blocked.set()
        assert await asyncio.wait_for(waiting, 2) == 2

    _in_pool(_limits(tokenize_threads=1, tokenize_seconds=0.1), scenario)

"""Rollouts of fake replicas in this process: two builds of one replica side by side, as routers receive them."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from headrace_cluster.controller.health import watch_health
from headrace_cluster.controller.members import Membership
from headrace_cluster.controller.supervisor import Supervisor
from headrace_cluster.core.driver import StartFailedError
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.record import State
from headrace_cluster.errors import DrainError, PlacementError, RoleError
from headrace_cluster.spec.cluster_spec import parse_spec
from headrace_proto import control_pb2, replica_pb2
from support.cluster.fake_driver import FakeDriver
from support.members import MEMBER

Eventually = Callable[..., Awaitable[Any]]

HEALTH = {"interval_seconds": 0.05, "silence_seconds": 5, "replace_seconds": 0.4, "drain_seconds": 2}
OLD, NEW, THIRD = (ReplicaName("smollm2-0", generation) for generation in (1, 2, 3))


@asynccontextmanager
async def _ready(
    driver: FakeDriver, eventually: Eventually, **model: Any
) -> AsyncIterator[tuple[Supervisor, list[dict[str, int]]]]:
    """Also yields the ready builds of every published member list: generation by address."""
    membership = Membership()
    spec = parse_spec({"models": [model or {"replicas": 1}], "health": HEALTH})
    supervisor = Supervisor(spec, driver, membership, partial(watch_health, MEMBER))
    lists: list[dict[str, int]] = []

    async def receive() -> None:
        async for members in membership.watch():
            listed = (member for member in members.members if member.state == replica_pb2.REPLICA_STATE_READY)
            lists.append({member.address: member.identity.generation for member in listed})

    supervisor.start()
    receiver = asyncio.create_task(receive())
    try:
        await eventually(lambda: supervisor.reconciler.ready and lists and lists[-1])
        membership.routers["one"] = control_pb2.RouterInfo(id="one")
        for replica in driver.replicas.values():
            replica.routers = 1
        await eventually(lambda: all(entry["connected"] for entry in supervisor.status()["replicas"]))
        lists.clear()
        yield supervisor, lists
    finally:
        receiver.cancel()
        await supervisor.stop()
    assert driver.replicas == {}


def _entry(supervisor: Supervisor) -> dict[str, Any]:
    found: dict[str, Any] = supervisor.status()["replicas"][0]
    return found


def test_the_only_replica_is_rolled_without_a_gap(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _ready(driver, eventually) as (supervisor, lists):
            old = driver.replicas[OLD]
            old.running = 1
            await eventually(lambda: _entry(supervisor)["load"]["running"] == 1)
            document = supervisor.drains.roll("smollm2-0", 30.0)
            assert document == {"id": "smollm2-0", "generation": 1, "seconds": 30.0, "beside": True}
            await eventually(lambda: lists and sorted(lists[-1].values()) == [1, 2])
            await asyncio.sleep(1.0)
            assert not old.draining, "a router is not connected to the next build yet"
            (beside,) = _entry(supervisor)["beside"]
            assert (beside["generation"], beside["state"], beside["load"]["running"]) == (2, "ready", 0)
            driver.replicas[NEW].routers = 1
            await eventually(lambda: old.draining)
            assert _entry(supervisor)["connected"]
            entry = _entry(supervisor)
            assert (entry["generation"], entry["state"]) == (2, "ready")
            assert entry["load"]["running"] == 0
            (beside,) = entry["beside"]
            assert (beside["generation"], beside["state"], beside["load"]["running"]) == (1, "draining", 1)
            assert supervisor.overview.in_flight == 1, "a stop would wait for it"
            await asyncio.sleep(0.3)
            assert ("stop", OLD) not in driver.calls, "it has a running request"
            old.running = 0
            await eventually(lambda: ("stop", OLD) in driver.calls and not _entry(supervisor)["beside"])
            assert all(lists), "every list has a ready build"
            assert [sorted(ready.values()) for ready in lists if ready][-1] == [2]

    asyncio.run(scenario())


def test_a_router_that_is_cut_off_from_the_controller_counts(driver: FakeDriver, eventually: Eventually) -> None:
    """Only the old build knows it; without that build it would have no replica."""

    async def scenario() -> None:
        async with _ready(driver, eventually) as (supervisor, lists):
            old = driver.replicas[OLD]
            await eventually(lambda: supervisor._builds[OLD].health.routers == 1)  # type: ignore[union-attr]
            supervisor._membership.routers.clear()
            supervisor.drains.roll("smollm2-0", 30.0)
            await eventually(lambda: lists and sorted(lists[-1].values()) == [1, 2])
            await asyncio.sleep(1.0)
            assert not old.draining
            driver.replicas[NEW].routers = 1
            await eventually(lambda: old.draining)

    asyncio.run(scenario())


def test_an_old_build_has_the_requested_seconds(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _ready(driver, eventually) as (supervisor, _):
            driver.replicas[OLD].running = 1
            supervisor.drains.roll("smollm2-0", 0.0)
            await eventually(lambda: NEW in driver.replicas)
            assert supervisor.drains._pending == {OLD: 0.0}
            driver.replicas[NEW].routers = 1
            await eventually(lambda: driver.replicas.get(OLD) is None or driver.replicas[OLD].draining)
            await eventually(lambda: ("stop", OLD) in driver.calls, 1)

    asyncio.run(scenario())


def test_a_next_build_that_fails_changes_nothing(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _ready(driver, eventually) as (supervisor, lists):
            driver.failures = [StartFailedError("a bad file", final=True)]
            supervisor.drains.roll("smollm2-0", allow_gap=True)
            await eventually(lambda: "a bad file" in _entry(supervisor)["roll_failed"])
            assert (_entry(supervisor)["generation"], _entry(supervisor)["state"]) == (1, "ready")
            assert all(lists) and not driver.replicas[OLD].draining and NEW not in driver.replicas
            assert not supervisor.reconciler.fatal
            await eventually(lambda: supervisor.drains._pending == {}, 1)

    asyncio.run(scenario())


@pytest.mark.parametrize("in_ray", [True, False])
def test_without_resources_it_ends_first_only_if_allowed(
    driver: FakeDriver, eventually: Eventually, in_ray: bool
) -> None:
    """Ray cannot place it, or its ranks have too little memory."""

    async def scenario() -> None:
        async with _ready(driver, eventually) as (supervisor, _):
            error = PlacementError("Ray has free: nothing") if in_ray else None
            memory = StartFailedError("too little memory", final=True, lacks_resources=True)
            for allow_gap in (False, True):
                driver.refusals, driver.failures = ([error], []) if error else ([], [memory])
                supervisor.drains.roll("smollm2-0", 0.0, allow_gap=allow_gap)
                if not allow_gap:
                    await eventually(lambda: "pass --allow-gap" in _entry(supervisor)["roll_failed"])
                    assert not driver.replicas[OLD].draining
            again = ReplicaName("smollm2-0", 4)
            await eventually(lambda: again in driver.replicas and supervisor.reconciler.ready)
            calls = [call for call in driver.calls if call[0] in ("launch", "stop") and call[1].generation in (1, 4)]
            assert calls[-2:] == [("stop", OLD), ("launch", again)]
            assert _entry(supervisor)["roll_failed"] == "" and _entry(supervisor)["beside"] == []

    asyncio.run(scenario())


def test_a_crash_of_the_next_build_does_not_wait_for_the_drain_of_the_old_one(
    driver: FakeDriver, eventually: Eventually
) -> None:
    async def scenario() -> None:
        async with _ready(driver, eventually) as (supervisor, _):
            old = driver.replicas[OLD]
            old.running = 1
            await eventually(lambda: _entry(supervisor)["load"]["running"] == 1)
            supervisor.drains.roll("smollm2-0", 600.0)
            await eventually(lambda: NEW in driver.replicas)
            driver.replicas[NEW].routers = 1
            await eventually(lambda: old.draining)
            driver.kill(NEW)
            await eventually(lambda: THIRD in driver.replicas and supervisor.reconciler.ready, 3)
            calls = [call for call in driver.calls if call[1] in (NEW, THIRD)]
            assert calls == [("launch", NEW), ("stop", NEW), ("launch", THIRD)]
            assert ("stop", OLD) not in driver.calls, "its request continues"
            old.running = 0
            await eventually(lambda: ("stop", OLD) in driver.calls and not _entry(supervisor)["beside"])

    asyncio.run(scenario())


def test_a_build_that_dies_while_it_drains_is_ended_before_the_next_is_placed(
    driver: FakeDriver, eventually: Eventually
) -> None:
    async def scenario() -> None:
        async with _ready(driver, eventually, replicas=2) as (supervisor, _):
            driver.replicas[OLD].running = 1
            await eventually(lambda: _entry(supervisor)["load"]["running"] == 1)
            supervisor.drains.roll("smollm2-0", 600.0)
            await eventually(lambda: driver.replicas[OLD].draining)
            driver.kill(OLD)
            await eventually(lambda: NEW in driver.replicas and supervisor.reconciler.ready)
            calls = [call for call in driver.calls if call[1] in (OLD, NEW) and call[0] != "drain"]
            assert calls[:3] == [("launch", OLD), ("stop", OLD), ("launch", NEW)]
            assert supervisor.reconciler.records["smollm2-0"].failures == [], "it was being ended"

    asyncio.run(scenario())


def test_one_of_several_ends_before_its_next_build(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _ready(driver, eventually, replicas=2) as (supervisor, lists):
            assert supervisor.drains.roll("smollm2-0", 0.0)["beside"] is False
            await eventually(lambda: NEW in driver.replicas and supervisor.reconciler.ready)
            calls = [
                call for call in driver.calls if call[0] in ("launch", "stop") and call[1].replica_id == "smollm2-0"
            ]
            assert calls == [("launch", OLD), ("stop", OLD), ("launch", NEW)] and all(lists)

    asyncio.run(scenario())


def test_rejected_rollouts(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _ready(driver, eventually) as (supervisor, _):
            with pytest.raises(DrainError, match="no replica 'x'"):
                supervisor.drains.roll("x")
            supervisor.drains.roll("smollm2-0")
            with pytest.raises(DrainError, match="is being rolled already"):
                supervisor.drains.roll("smollm2-0")
            with pytest.raises(RoleError, match="is being rolled"):
                await supervisor.roles.change("smollm2-0", "decode")
            supervisor.drains.begin("smollm2-0", 0, force=True)
            with pytest.raises(DrainError, match="run rollout again when it is ready"):
                supervisor.drains.roll("smollm2-0")
            record = supervisor.reconciler.records["smollm2-0"]
            await eventually(lambda: record.state is State.DRAINED and set(driver.replicas) == set())

    asyncio.run(scenario())


def test_a_stop_ends_both_builds(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _ready(driver, eventually) as (supervisor, _):
            supervisor.drains.roll("smollm2-0")
            await eventually(lambda: NEW in driver.replicas)
            async with asyncio.timeout(5):
                await supervisor.stop()
            assert driver.replicas == {}

    asyncio.run(scenario())

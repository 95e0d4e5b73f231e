"""Drains on demand: requests may finish, the replica stays down until it is undrained."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from headrace_cluster.cli.drain import progress
from headrace_cluster.controller.health import watch_health
from headrace_cluster.controller.members import Membership
from headrace_cluster.controller.status import down_reason
from headrace_cluster.controller.supervisor import Supervisor
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.record import Record, State
from headrace_cluster.core.view import BUILT_AGAIN
from headrace_cluster.errors import DrainError
from headrace_cluster.launch import cluster_display
from headrace_cluster.spec.cluster_spec import parse_spec
from headrace_proto import control_pb2, replica_pb2
from support.cluster.fake_driver import FakeDriver
from support.members import MEMBER

Eventually = Callable[..., Awaitable[Any]]

HEALTH = {"interval_seconds": 0.05, "silence_seconds": 0.5, "replace_seconds": 0.4, "drain_seconds": 2}
FIRST = ReplicaName("smollm2-0", 1)
SECOND = ReplicaName("smollm2-1", 1)


@asynccontextmanager
async def _ready(
    driver: FakeDriver, eventually: Eventually, **model: Any
) -> AsyncIterator[tuple[Supervisor, Membership]]:
    membership = Membership()
    spec = parse_spec({"models": [model or {"replicas": 2}], "health": HEALTH})
    supervisor = Supervisor(spec, driver, membership, partial(watch_health, MEMBER))
    supervisor.start()
    try:
        await eventually(lambda: supervisor.reconciler.ready)
        yield supervisor, membership
    finally:
        await supervisor.stop()


def _entry(supervisor: Supervisor, place: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(supervisor.status()))["replicas"][place]
    return found


async def _begin_drain_of_a_busy_replica(
    driver: FakeDriver, supervisor: Supervisor, eventually: Eventually, seconds: float
) -> None:
    driver.replicas[SECOND].running = 1
    await eventually(lambda: _entry(supervisor, 1)["load"]["running"] == 1)
    supervisor.drains.begin("smollm2-1", seconds)
    await eventually(lambda: driver.replicas[SECOND].draining)


async def _members(membership: Membership) -> dict[str, int]:
    """Generations of the members that are listed as ready."""
    members = (await anext(membership.watch())).members
    ready = [member for member in members if member.state == replica_pb2.REPLICA_STATE_READY]
    return {member.identity.replica_id: member.identity.generation for member in ready}


def test_a_drain_waits_for_requests_then_ends_and_stays_down(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _ready(driver, eventually) as (supervisor, membership):
            replica = driver.replicas[SECOND]
            replica.running = 2
            await eventually(lambda: _entry(supervisor, 1)["load"]["running"] == 2)
            assert supervisor.drains.begin("smollm2-1", 30.0) == {"id": "smollm2-1", "generation": 1, "seconds": 30.0}
            await eventually(lambda: replica.draining, 1)
            assert driver.held == {SECOND: True}
            assert await _members(membership) == {"smollm2-0": 1}
            assert _entry(supervisor, 1)["state"] == "draining"
            assert "what still runs in" in _entry(supervisor, 1)["note"]
            await asyncio.sleep(0.3)
            assert ("stop", SECOND) not in driver.calls
            replica.running = 0
            await eventually(lambda: _entry(supervisor, 1)["state"] == "drained", 2)
            assert SECOND not in driver.replicas, "its memory is free"
            assert supervisor.reconciler.ready, "it does not count as missing"
            await asyncio.sleep(0.5)
            drained = _entry(supervisor, 1)
            assert (drained["state"], drained["ranks"], drained["generation"]) == ("drained", [], 1)
            assert "headrace undrain smollm2-1" in drained["note"]
            assert supervisor.drains.begin("smollm2-1")["generation"] == 1, "a second call is no error"
            supervisor.drains.end("smollm2-1")
            await eventually(lambda: supervisor.reconciler.records["smollm2-1"].generation == 2)
            await eventually(lambda: supervisor.reconciler.ready)
            await asyncio.sleep(0.1)
            assert await _members(membership) == {"smollm2-0": 1, "smollm2-1": 2}

    asyncio.run(scenario())


def test_the_deadline_of_a_replica_that_ends_without_draining_is_discarded(
    driver: FakeDriver, eventually: Eventually
) -> None:
    async def scenario() -> None:
        async with _ready(driver, eventually) as (supervisor, _):
            driver.process_gate.clear()
            driver.kill(SECOND)
            await eventually(lambda: supervisor.reconciler.records["smollm2-1"].state is State.STARTING)
            supervisor.drains.begin("smollm2-1", 600.0)
            driver.process_gate.set()
            await eventually(lambda: _entry(supervisor, 1)["state"] == "drained")
            assert supervisor.drains.remaining() == {}

    asyncio.run(scenario())


def test_a_drain_ends_at_its_deadline(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _ready(driver, eventually) as (supervisor, _):
            driver.replicas[SECOND].running = 1
            await eventually(lambda: _entry(supervisor, 1)["load"]["running"] == 1)
            supervisor.drains.begin("smollm2-1", 0.3)
            await eventually(lambda: _entry(supervisor, 1)["state"] == "drained", 1.5)

    asyncio.run(scenario())


def test_a_rank_that_is_not_reached_is_ended_at_the_deadline(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _ready(driver, eventually) as (supervisor, _):
            driver.errors["drain"] += [ConnectionError("Ray does not answer")] * 100
            supervisor.drains.begin("smollm2-1", 0.5)
            await eventually(lambda: _entry(supervisor, 1)["state"] == "drained")
            assert any("the drain of smollm2-1 failed" in problem for problem in supervisor.status()["problems"])

    asyncio.run(scenario())


def test_health_from_before_the_drain_does_not_end_it(driver: FakeDriver, eventually: Eventually) -> None:
    """A request may have been sent to an idle replica just when the drain began."""

    async def scenario() -> None:
        async with _ready(driver, eventually) as (supervisor, _):
            replica = driver.replicas[SECOND]
            replica.health_paused.set()
            await asyncio.sleep(0.1)
            replica.running = 1
            supervisor.drains.begin("smollm2-1", 20)
            await eventually(lambda: replica.draining)
            await asyncio.sleep(0.2)
            assert ("stop", SECOND) not in driver.calls
            replica.health_paused.clear()
            await asyncio.sleep(0.2)
            assert ("stop", SECOND) not in driver.calls
            replica.running = 0
            await eventually(lambda: ("stop", SECOND) in driver.calls, 1)

    asyncio.run(scenario())


def test_a_replica_that_dies_while_draining(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _ready(driver, eventually) as (supervisor, _):
            await _begin_drain_of_a_busy_replica(driver, supervisor, eventually, 60)
            driver.kill(SECOND)
            await eventually(lambda: _entry(supervisor, 1)["state"] == "drained", 2)
            await asyncio.sleep(0.5)
            assert [name for call, name in driver.calls if call == "launch"] == [FIRST, SECOND]

    asyncio.run(scenario())


def test_undrain_during_a_drain_rebuilds_it_afterwards(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _ready(driver, eventually) as (supervisor, _):
            await _begin_drain_of_a_busy_replica(driver, supervisor, eventually, 60)
            supervisor.drains.end("smollm2-1")
            assert not supervisor.reconciler.ready
            driver.replicas[SECOND].running = 0
            await eventually(lambda: _entry(supervisor, 1)["generation"] == 2)
            await eventually(lambda: supervisor.reconciler.ready)

    asyncio.run(scenario())


def test_a_stop_of_the_cluster_does_not_wait_for_a_long_drain(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _ready(driver, eventually) as (supervisor, _):
            await _begin_drain_of_a_busy_replica(driver, supervisor, eventually, 3600)
            async with asyncio.timeout(4):  # drain_seconds is 2
                await supervisor.stop()
            assert driver.replicas == {}

    asyncio.run(scenario())


def test_a_drained_replica_does_not_delay_a_stop(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _ready(driver, eventually) as (supervisor, _):
            supervisor.drains.begin("smollm2-1", 0)
            await eventually(lambda: _entry(supervisor, 1)["state"] == "drained")
            async with asyncio.timeout(2):
                await supervisor.stop()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("replica_id", "words"),
    [
        ("other", ("no replica 'other'", "smollm2-0, smollm2-1")),
        ("smollm2-0", ("without smollm2-0", "--force")),
    ],
)
def test_rejected_drains(driver: FakeDriver, eventually: Eventually, replica_id: str, words: tuple[str, ...]) -> None:
    """smollm2-1 is drained at the same time: it does not count any more."""

    async def scenario() -> None:
        async with _ready(driver, eventually) as (supervisor, _):
            supervisor.drains.begin("smollm2-1", 0)
            with pytest.raises(DrainError) as raised:
                supervisor.drains.begin(replica_id, 0)
            assert all(word in str(raised.value) for word in words), str(raised.value)
            await eventually(lambda: _entry(supervisor, 1)["state"] == "drained")
            with pytest.raises(DrainError) as raised:
                supervisor.drains.begin(replica_id, 0)
            assert _entry(supervisor, 0)["state"] == "ready"

    asyncio.run(scenario())


def test_a_rollout_waits_for_routers_unless_a_gap_is_allowed(driver: FakeDriver, eventually: Eventually) -> None:
    """One router may not reach the other replica, until the network is repaired."""

    async def scenario() -> None:
        async with _ready(driver, eventually) as (supervisor, membership):
            membership.routers["one"] = control_pb2.RouterInfo(id="one")
            await eventually(lambda: not any(entry["connected"] for entry in supervisor.status()["replicas"]))
            with pytest.raises(DrainError, match="not every router is connected to smollm2-1 yet"):
                supervisor.drains.roll("smollm2-0")
            assert supervisor.drains.roll("smollm2-0", allow_gap=True)["beside"]

    asyncio.run(scenario())


@pytest.mark.parametrize("by_operator", [True, False])
def test_a_rollout_waits_for_the_one_before(driver: FakeDriver, eventually: Eventually, by_operator: bool) -> None:
    """Of another operator, or of the controller: N - 1 replicas serve."""

    async def scenario() -> None:
        async with _ready(driver, eventually, replicas=3) as (supervisor, _):
            driver.replicas[SECOND].running = 1
            await eventually(lambda: _entry(supervisor, 1)["load"]["running"] == 1)
            supervisor.drains.begin("smollm2-2", 0)  # what an operator drained does not count
            if by_operator:
                supervisor.drains.roll("smollm2-1", 60)
                with pytest.raises(DrainError, match="smollm2-1 is being rolled; try again"):
                    supervisor.drains.roll("smollm2-0")
            else:
                supervisor.reconciler.records["smollm2-1"].outdated = True
            await eventually(lambda: driver.replicas[SECOND].draining)
            with pytest.raises(DrainError, match="--allow-gap"):
                supervisor.drains.roll("smollm2-0")
            driver.replicas[SECOND].running = 0
            await eventually(lambda: ReplicaName("smollm2-1", 2) in driver.replicas and supervisor.reconciler.ready)
            assert not supervisor.drains.roll("smollm2-0", 0)["beside"]
            supervisor.drains.roll("smollm2-1", 0, allow_gap=True)

    asyncio.run(scenario())


def test_the_last_decoding_replica_is_drained_with_force(driver: FakeDriver, eventually: Eventually) -> None:
    pools: dict[str, Any] = {"prefill": {}, "decode": {}}

    async def scenario() -> None:
        async with _ready(driver, eventually, **pools) as (supervisor, membership):
            with pytest.raises(DrainError, match="--force"):
                supervisor.drains.begin("smollm2-0", 0)
            supervisor.drains.begin("smollm2-1", 0)  # the prefill replica: not needed to serve
            supervisor.drains.begin("smollm2-0", 0, force=True)
            await eventually(lambda: {_entry(supervisor, i)["state"] for i in (0, 1)} == {"drained"})
            assert await _members(membership) == {}

    asyncio.run(scenario())


def test_undrain_of_a_ready_replica_is_rejected(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _ready(driver, eventually) as (supervisor, _):
            with pytest.raises(DrainError, match="smollm2-0 is ready, not drained"):
                supervisor.drains.end("smollm2-0")
            with pytest.raises(DrainError, match="no replica 'x'"):
                supervisor.drains.end("x")

    asyncio.run(scenario())


def test_progress_without_a_note_is_the_state_alone() -> None:
    assert progress({"state": "starting", "note": ""}) == "starting"
    assert progress({"state": "starting", "note": "loading weights"}) == "starting: loading weights"


def test_a_requested_rebuild_is_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[tuple[str, ...]] = []
    monkeypatch.setattr(cluster_display, "show_message", lambda *words, **facts: reported.append(words))
    failures = {"m-0": BUILT_AGAIN, "m-1": "killed"}
    view: Any = SimpleNamespace(failures=failures, problems=["the end of m-1 failed 2 times"])
    cluster_display.ClusterDisplay().show_changes(view)
    assert reported == [(BUILT_AGAIN, "info"), ("killed", "warning"), ("the end of m-1 failed 2 times", "warning")]


@pytest.mark.parametrize(
    ("state", "held", "cause", "reason"),
    [
        (State.READY, False, "", ""),
        (State.READY, True, "", "draining"),
        (State.DRAINING, True, "killed", "draining"),
        (State.DRAINED, True, "", "the note"),
        (State.DEAD, False, "", "it is being built again"),
        (State.STARTING, False, "", "it is being built again"),
        (State.STARTING, False, "killed", "the note"),
        (State.UNHEALTHY, False, "", "the note"),
    ],
)
def test_the_reason_that_serve_shows(state: State, held: bool, cause: str, reason: str) -> None:
    spec = parse_spec({}).models[0]
    record = Record("m-0", spec, generation=2, state=state, ever_ready=True, held=held, cause=cause)
    assert down_reason(record, "the note") == reason
    assert down_reason(Record("m-0", spec, generation=1, state=State.STARTING), "loading weights") == ""

"""Drains on demand: what runs may finish, the replica stays down, and comes back when it is wanted."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fake_driver import FakeDriver

from headrace_cluster.controller.members import Membership
from headrace_cluster.controller.reconciler import Record, State
from headrace_cluster.controller.status import trouble
from headrace_cluster.controller.supervisor import Supervisor
from headrace_cluster.errors import DrainError
from headrace_cluster.naming import ReplicaName
from headrace_cluster.spec import parse_spec
from headrace_proto import replica_pb2

Eventually = Callable[..., Awaitable[Any]]

HEALTH = {"interval_seconds": 0.05, "silence_seconds": 0.5, "replace_seconds": 0.4, "drain_seconds": 2}
FIRST = ReplicaName("smollm2-0", 1)
SECOND = ReplicaName("smollm2-1", 1)


@asynccontextmanager
async def _ready(
    driver: FakeDriver, secret: bytes, eventually: Eventually, **model: Any
) -> AsyncIterator[tuple[Supervisor, Membership]]:
    membership = Membership()
    spec = parse_spec({"models": [model or {"replicas": 2}], "health": HEALTH})
    supervisor = Supervisor(spec, driver, membership, secret)
    supervisor.start()
    try:
        await eventually(lambda: supervisor.reconciler.ready)
        yield supervisor, membership
    finally:
        await supervisor.stop()


def _entry(supervisor: Supervisor, place: int) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(supervisor.status()))["replicas"][place]
    return found


async def _members(membership: Membership) -> dict[str, int]:
    """Generations of those that are listed as ready."""
    members = (await anext(membership.watch())).members
    ready = [member for member in members if member.state == replica_pb2.REPLICA_STATE_READY]
    return {member.identity.replica_id: member.identity.generation for member in ready}


def test_a_drain_waits_for_what_runs_then_ends_and_stays_down(
    driver: FakeDriver, secret: bytes, eventually: Eventually
) -> None:
    async def scenario() -> None:
        async with _ready(driver, secret, eventually) as (supervisor, membership):
            replica = driver.replicas[SECOND]
            replica.running = 2
            await eventually(lambda: _entry(supervisor, 1)["load"]["running"] == 2)
            assert supervisor.drains.begin("smollm2-1", 30.0) == {"id": "smollm2-1", "generation": 1, "seconds": 30.0}
            await eventually(lambda: replica.draining, 1)
            assert await _members(membership) == {"smollm2-0": 1}
            assert _entry(supervisor, 1)["state"] == "draining"
            assert "what still runs in" in _entry(supervisor, 1)["note"]
            await asyncio.sleep(0.3)
            assert ("stop", SECOND) not in driver.calls
            replica.running = 0
            await eventually(lambda: _entry(supervisor, 1)["state"] == "drained", 2)
            assert SECOND not in driver.replicas, "its memory is free"
            assert supervisor.reconciler.ready, "nobody misses it"
            await asyncio.sleep(0.5)
            drained = _entry(supervisor, 1)
            assert (drained["state"], drained["ranks"], drained["generation"]) == ("drained", [], 1)
            assert "headrace undrain smollm2-1" in drained["note"]
            assert supervisor.drains.begin("smollm2-1")["generation"] == 1, "asking again is no mistake"
            supervisor.drains.end("smollm2-1")
            await eventually(lambda: supervisor.reconciler.records["smollm2-1"].generation == 2)
            await eventually(lambda: supervisor.reconciler.ready)
            await asyncio.sleep(0.1)
            assert await _members(membership) == {"smollm2-0": 1, "smollm2-1": 2}

    asyncio.run(scenario())


def test_after_its_time_it_ends_whatever_runs(driver: FakeDriver, secret: bytes, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _ready(driver, secret, eventually) as (supervisor, _):
            driver.replicas[SECOND].running = 1
            await eventually(lambda: _entry(supervisor, 1)["load"]["running"] == 1)
            supervisor.drains.begin("smollm2-1", 0.3)
            await eventually(lambda: _entry(supervisor, 1)["state"] == "drained", 1.5)

    asyncio.run(scenario())


def test_health_from_before_the_drain_does_not_end_it(
    driver: FakeDriver, secret: bytes, eventually: Eventually
) -> None:
    """An idle replica may have been sent a request in the moment when the drain began."""

    async def scenario() -> None:
        async with _ready(driver, secret, eventually) as (supervisor, _):
            replica = driver.replicas[SECOND]
            replica.silent.set()
            await asyncio.sleep(0.1)
            replica.running = 1
            supervisor.drains.begin("smollm2-1", 20)
            await eventually(lambda: replica.draining)
            await asyncio.sleep(0.2)
            assert ("stop", SECOND) not in driver.calls
            replica.silent.clear()
            await asyncio.sleep(0.2)
            assert ("stop", SECOND) not in driver.calls
            replica.running = 0
            await eventually(lambda: ("stop", SECOND) in driver.calls, 1)

    asyncio.run(scenario())


def test_one_that_dies_while_it_drains_is_drained(driver: FakeDriver, secret: bytes, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _ready(driver, secret, eventually) as (supervisor, _):
            driver.replicas[SECOND].running = 1
            await eventually(lambda: _entry(supervisor, 1)["load"]["running"] == 1)
            supervisor.drains.begin("smollm2-1", 60)
            await eventually(lambda: driver.replicas[SECOND].draining)
            driver.kill(SECOND)
            await eventually(lambda: _entry(supervisor, 1)["state"] == "drained", 2)
            await asyncio.sleep(0.5)
            assert [name for call, name in driver.calls if call == "launch"] == [FIRST, SECOND]

    asyncio.run(scenario())


def test_undrain_while_it_drains_brings_it_back_after(
    driver: FakeDriver, secret: bytes, eventually: Eventually
) -> None:
    async def scenario() -> None:
        async with _ready(driver, secret, eventually) as (supervisor, _):
            driver.replicas[SECOND].running = 1
            await eventually(lambda: _entry(supervisor, 1)["load"]["running"] == 1)
            supervisor.drains.begin("smollm2-1", 60)
            await eventually(lambda: driver.replicas[SECOND].draining)
            supervisor.drains.end("smollm2-1")
            assert not supervisor.reconciler.ready
            driver.replicas[SECOND].running = 0
            await eventually(lambda: _entry(supervisor, 1)["generation"] == 2)
            await eventually(lambda: supervisor.reconciler.ready)

    asyncio.run(scenario())


def test_a_stop_of_all_does_not_wait_for_a_long_drain(
    driver: FakeDriver, secret: bytes, eventually: Eventually
) -> None:
    async def scenario() -> None:
        async with _ready(driver, secret, eventually) as (supervisor, _):
            driver.replicas[SECOND].running = 1
            await eventually(lambda: _entry(supervisor, 1)["load"]["running"] == 1)
            supervisor.drains.begin("smollm2-1", 3600)
            await eventually(lambda: driver.replicas[SECOND].draining)
            async with asyncio.timeout(4):  # drain_seconds is 2
                await supervisor.stop()
            assert driver.replicas == {}

    asyncio.run(scenario())


def test_a_drained_replica_does_not_keep_a_stop_waiting(
    driver: FakeDriver, secret: bytes, eventually: Eventually
) -> None:
    async def scenario() -> None:
        async with _ready(driver, secret, eventually) as (supervisor, _):
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
def test_what_is_refused(
    driver: FakeDriver, secret: bytes, eventually: Eventually, replica_id: str, words: tuple[str, ...]
) -> None:
    """smollm2-1 is asked to go in the same moment: it does not count any more."""

    async def scenario() -> None:
        async with _ready(driver, secret, eventually) as (supervisor, _):
            supervisor.drains.begin("smollm2-1", 0)
            with pytest.raises(DrainError) as raised:
                supervisor.drains.begin(replica_id, 0)
            assert all(word in str(raised.value) for word in words), str(raised.value)
            await eventually(lambda: _entry(supervisor, 1)["state"] == "drained")
            with pytest.raises(DrainError) as raised:
                supervisor.drains.begin(replica_id, 0)
            assert _entry(supervisor, 0)["state"] == "ready"

    asyncio.run(scenario())


def test_the_last_that_can_decode_is_drained_by_force(
    driver: FakeDriver, secret: bytes, eventually: Eventually
) -> None:
    pools = {"prefill": {}, "decode": {}}

    async def scenario() -> None:
        async with _ready(driver, secret, eventually, **pools) as (supervisor, membership):
            with pytest.raises(DrainError, match="--force"):
                supervisor.drains.begin("smollm2-0", 0)
            supervisor.drains.begin("smollm2-1", 0)  # the one for prompts: nobody depends on it
            supervisor.drains.begin("smollm2-0", 0, force=True)
            await eventually(lambda: {_entry(supervisor, i)["state"] for i in (0, 1)} == {"drained"})
            assert await _members(membership) == {}

    asyncio.run(scenario())


def test_undrain_of_one_that_is_up_is_refused(driver: FakeDriver, secret: bytes, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _ready(driver, secret, eventually) as (supervisor, _):
            with pytest.raises(DrainError, match="smollm2-0 is ready, not drained"):
                supervisor.drains.end("smollm2-0")
            with pytest.raises(DrainError, match="no replica 'x'"):
                supervisor.drains.end("x")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("state", "held", "cause", "said"),
    [
        (State.READY, False, "", ""),
        (State.READY, True, "", "draining"),
        (State.DRAINING, True, "killed", "draining"),
        (State.DRAINED, True, "", "the note"),
        (State.DEAD, False, "", "it is built again"),
        (State.STARTING, False, "", "it is built again"),
        (State.STARTING, False, "killed", "the note"),
        (State.UNHEALTHY, False, "", "the note"),
    ],
)
def test_what_serve_says_of_it(state: State, held: bool, cause: str, said: str) -> None:
    spec = parse_spec({}).models[0]
    record = Record("m-0", spec, generation=2, state=state, ever_ready=True, held=held, cause=cause)
    assert trouble(record, "the note") == said
    assert trouble(Record("m-0", spec, generation=1, state=State.STARTING), "loading weights") == ""

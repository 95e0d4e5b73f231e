"""Pools and roles: which replicas are built, which role changes are allowed, and what routers receive."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from headrace_cluster.controller import roles as roles_module
from headrace_cluster.controller.health import watch_health
from headrace_cluster.controller.members import Membership
from headrace_cluster.controller.supervisor import Supervisor
from headrace_cluster.core.backoff import Backoff
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.errors import RoleError
from headrace_cluster.spec.cluster_spec import parse_spec
from headrace_proto import replica_pb2
from support.cluster.fake_driver import FakeDriver
from support.members import MEMBER

Eventually = Callable[..., Awaitable[Any]]

HEALTH = {"interval_seconds": 0.05, "silence_seconds": 0.5, "replace_seconds": 0.4, "drain_seconds": 2}
POOLS = {"prefill": {"replicas": 1, "tp": 2}, "decode": {"replicas": 2}}
NAMES = {replica_pb2.ROLE_BOTH: "both", replica_pb2.ROLE_PREFILL: "prefill", replica_pb2.ROLE_DECODE: "decode"}


@asynccontextmanager
async def _ready(
    driver: FakeDriver, eventually: Eventually, **model: Any
) -> AsyncIterator[tuple[Supervisor, Membership]]:
    membership = Membership()
    supervisor = Supervisor(
        parse_spec({"models": [model or POOLS], "health": HEALTH}), driver, membership, partial(watch_health, MEMBER)
    )
    supervisor.start()
    try:
        await eventually(lambda: supervisor.reconciler.ready)
        yield supervisor, membership
    finally:
        await supervisor.stop()


async def _listed(membership: Membership) -> dict[str, str]:
    """Roles in the current member list."""
    members = await anext(membership.watch())
    return {member.identity.replica_id: NAMES[member.identity.role] for member in members.members}


def test_each_replica_has_the_role_and_the_shape_of_its_pool(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _ready(driver, eventually) as (supervisor, membership):
            document = json.loads(json.dumps(supervisor.status()))
            assert [(r["id"], r["role"], r["tp"], r["pp"]) for r in document["replicas"]] == [
                ("smollm2-0", "decode", 1, 1),
                ("smollm2-1", "decode", 1, 1),
                ("smollm2-2", "prefill", 2, 1),
            ]
            assert await _listed(membership) == {"smollm2-0": "decode", "smollm2-1": "decode", "smollm2-2": "prefill"}
            assert [driver.replicas[ReplicaName(f"smollm2-{i}", 1)].role for i in range(3)] == [
                "decode",
                "decode",
                "prefill",
            ]

    asyncio.run(scenario())


def test_a_role_change_is_published_at_once_and_outlives_the_build(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _ready(driver, eventually) as (supervisor, membership):
            for replica_id, role in (("smollm2-2", "both"), ("smollm2-0", "prefill")):
                document = await supervisor.roles.change(replica_id, role)
                assert (document["id"], document["role"], document["generation"]) == (replica_id, role, 1)
                assert (await _listed(membership))[replica_id] == role, "before the response, whatever health reports"
                assert driver.replicas[ReplicaName(replica_id, 1)].role == role
            assert [name for name, _ in driver.calls].count("launch") == 3, "no build is started"
            driver.kill(ReplicaName("smollm2-0", 1))
            await eventually(lambda: supervisor.reconciler.records["smollm2-0"].generation == 2)
            await eventually(lambda: supervisor.reconciler.ready)
            assert driver.replicas[ReplicaName("smollm2-0", 2)].role == "prefill"
            await asyncio.sleep(0.1)
            assert (await _listed(membership))["smollm2-0"] == "prefill"

    asyncio.run(scenario())


def test_stale_health_does_not_change_the_role(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _ready(driver, eventually) as (supervisor, membership):
            await supervisor.roles.change("smollm2-0", "both")
            driver.replicas[ReplicaName("smollm2-0", 1)].role = "prefill"
            await asyncio.sleep(0.3)
            assert (await _listed(membership))["smollm2-0"] == "both"
            assert supervisor.status()["replicas"][0]["role"] == "both"

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("replica_id", "role", "words"),
    [
        ("other-0", "decode", ("no replica 'other-0'", "smollm2-0, smollm2-1, smollm2-2")),
        ("smollm2-0", "encode", ("prefill, decode or both", "'encode'")),
        ("smollm2-0", "prefill", ("smollm2-0 is the only ready replica", "another one")),
        ("smollm2-1", "prefill", ("smollm2-1 is dead", "ready")),
    ],
)
def test_rejected_role_changes(
    driver: FakeDriver, eventually: Eventually, replica_id: str, role: str, words: tuple[str, ...]
) -> None:
    """One of the two decode replicas is down for some seconds."""

    async def scenario() -> None:
        async with _ready(driver, eventually) as (supervisor, membership):
            record = supervisor.reconciler.records["smollm2-1"]
            record.failures = [supervisor._clock()] * 5  # the next build is some seconds away
            driver.kill(ReplicaName("smollm2-1", 1))
            await eventually(lambda: str(record.state) == "dead")
            with pytest.raises(RoleError) as raised:
                await supervisor.roles.change(replica_id, role)
            assert all(word in str(raised.value) for word in words), str(raised.value)
            assert (await _listed(membership))["smollm2-0"] == "decode"
            assert "role" not in [name for name, _ in driver.calls]

    asyncio.run(scenario())


def test_concurrent_changes_keep_one_that_decodes(driver: FakeDriver, eventually: Eventually) -> None:
    """Each is allowed alone; during the first, the second must take it into account."""

    async def scenario() -> None:
        async with _ready(driver, eventually) as (supervisor, _):
            driver.role_gate.clear()
            changes = [asyncio.create_task(supervisor.roles.change(f"smollm2-{i}", "prefill")) for i in (0, 1)]
            await eventually(lambda: "role" in [name for name, _ in driver.calls])
            driver.role_gate.set()
            outcomes = await asyncio.gather(*changes, return_exceptions=True)
            assert [isinstance(outcome, RoleError) for outcome in outcomes] == [False, True]
            assert supervisor.reconciler.records["smollm2-1"].answers

    asyncio.run(scenario())


def test_without_a_reply_the_role_is_kept(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _ready(driver, eventually) as (supervisor, membership):
            driver.unresponsive.add(ReplicaName("smollm2-2", 1))
            with pytest.raises(RoleError, match="does not answer"):
                await supervisor.roles.change("smollm2-2", "decode")
            assert (await _listed(membership))["smollm2-2"] == "prefill"
            assert supervisor.reconciler.records["smollm2-2"].role == "prefill"

    asyncio.run(scenario())


def test_a_role_that_arrives_late_is_corrected(
    driver: FakeDriver, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank was stopped: Ray delivers the call when it goes on, after the response that the role stays."""
    name = ReplicaName("smollm2-0", 1)
    monkeypatch.setattr(roles_module, "RESEND", Backoff(0.1, 0.2))

    async def scenario() -> None:
        async with _ready(driver, eventually) as (supervisor, membership):
            driver.unresponsive.add(name)
            with pytest.raises(RoleError, match="does not answer"):
                await supervisor.roles.change("smollm2-0", "prefill")
            driver.replicas[name].role = "prefill"
            calls = driver.calls.count(("role", name))
            await eventually(lambda: driver.calls.count(("role", name)) >= calls + 2)
            assert (await _listed(membership))["smollm2-0"] == "decode"
            driver.unresponsive.clear()
            await eventually(lambda: driver.replicas[name].role == "decode")
            first, second, *_ = numbers = driver.numbers[name]
            assert first < second and numbers == sorted(numbers), "the rank ignores the first one if it arrives later"
            calls = driver.calls.count(("role", name))
            await asyncio.sleep(0.5)
            assert driver.calls.count(("role", name)) == calls, "nothing is sent while the role is right"
            driver.latest[name] = numbers[-1] + 2  # of a decision that the last controller did not record
            driver.replicas[name].role = "both"
            await eventually(lambda: driver.replicas[name].role == "decode")

    asyncio.run(scenario())


def test_without_pools_every_replica_does_both(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _ready(driver, eventually, replicas=2) as (supervisor, membership):
            assert set((await _listed(membership)).values()) == {"both"}
            await supervisor.roles.change("smollm2-1", "prefill")
            with pytest.raises(RoleError, match="leave no replica to serve"):
                await supervisor.roles.change("smollm2-0", "prefill")
            again = await supervisor.roles.change("smollm2-1", "prefill")
            assert (again["before"], again["role"]) == ("prefill", "prefill")

    asyncio.run(scenario())

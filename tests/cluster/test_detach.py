"""Errors of the controller, or of Ray, end no replica: they are repeated and shown."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from headrace_cluster.controller.health import STATES, watch_health
from headrace_cluster.controller.members import Membership
from headrace_cluster.controller.supervisor import Supervisor
from headrace_cluster.core.backoff import Backoff
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.record import Action
from headrace_cluster.spec.cluster_spec import parse_spec
from headrace_proto import replica_pb2
from support.cluster.fake_driver import FakeDriver
from support.members import MEMBER

Eventually = Callable[..., Awaitable[Any]]

HEALTH = {"interval_seconds": 0.05, "silence_seconds": 0.3, "replace_seconds": 0.4, "drain_seconds": 2}
USED_STATES = "headrace_cluster.controller.health_receivers.STATES"
FIRST, SECOND = ReplicaName("smollm2-0", 1), ReplicaName("smollm2-0", 2)


class GcsError(Exception):
    """What a call of Ray raises when its GCS does not answer."""


@asynccontextmanager
async def _running(driver: FakeDriver, eventually: Eventually, replicas: int = 1) -> AsyncIterator[Supervisor]:
    spec = parse_spec({"models": [{"replicas": replicas}], "health": HEALTH})
    supervisor = Supervisor(spec, driver, Membership(), partial(watch_health, MEMBER))
    supervisor.start()
    try:
        await eventually(lambda: supervisor.reconciler.ready)
        yield supervisor
    finally:
        await supervisor.stop()
        assert driver.replicas == {}


def _stopped(driver: FakeDriver) -> list[ReplicaName]:
    return [name for call, name in driver.calls if call == "stop"]


def test_a_failed_pass_ends_nothing_and_is_repeated(
    driver: FakeDriver, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with _running(driver, eventually, replicas=2) as supervisor:
            decide = supervisor.reconciler.actions

            def fail(now: float) -> list[Action]:
                raise KeyError("a bug")

            monkeypatch.setattr(supervisor.reconciler, "actions", fail)
            (problem,) = await eventually(lambda: supervisor.status()["problems"])
            assert "a pass over all replicas failed" in problem and "a bug" in problem
            assert supervisor.reconciler.fatal == "" and _stopped(driver) == []
            driver.kill(FIRST)
            monkeypatch.setattr(supervisor.reconciler, "actions", decide)
            await eventually(lambda: SECOND in driver.replicas and supervisor.reconciler.ready)
            assert supervisor.status()["problems"] == []

    asyncio.run(scenario())


def test_actions_that_a_failed_pass_did_not_execute_are_made_up_for(
    driver: FakeDriver, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reconciler returns each action once."""

    async def scenario() -> None:
        async with _running(driver, eventually, replicas=2) as supervisor:
            decide = supervisor.reconciler.actions

            def lose(now: float) -> list[Action]:
                monkeypatch.setattr(supervisor.reconciler, "actions", decide)
                assert decide(now)
                raise KeyError("a bug")

            supervisor.drains.begin("smollm2-1")
            monkeypatch.setattr(supervisor.reconciler, "actions", lose)
            await eventually(lambda: supervisor.status()["replicas"][1]["state"] == "drained")
            supervisor.drains.end("smollm2-1")
            monkeypatch.setattr(supervisor.reconciler, "actions", lose)
            await eventually(lambda: supervisor.reconciler.ready)

    asyncio.run(scenario())


def test_a_stop_ends_all_even_if_every_pass_fails(
    driver: FakeDriver, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(now: float) -> list[Action]:
        raise KeyError("a bug")

    async def scenario() -> None:
        async with _running(driver, eventually) as supervisor:
            monkeypatch.setattr(supervisor.reconciler, "actions", fail)
            await eventually(lambda: supervisor.status()["problems"])
            async with asyncio.timeout(5):
                await supervisor.stop()
            assert driver.replicas == {}

    asyncio.run(scenario())


def test_a_watch_that_fails_is_no_death(driver: FakeDriver, eventually: Eventually) -> None:
    driver.errors["wait_for_death"] = [GcsError("no GCS"), GcsError("no GCS")]

    async def scenario() -> None:
        async with _running(driver, eventually) as supervisor:
            await eventually(lambda: not driver.errors["wait_for_death"])
            await asyncio.sleep(0.3)
            assert _stopped(driver) == [] and supervisor.reconciler.ready
            driver.kill(FIRST)
            await eventually(lambda: SECOND in driver.replicas and supervisor.reconciler.ready)

    asyncio.run(scenario())


def test_a_failed_clean_up_is_repeated_before_the_next_build(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _running(driver, eventually, replicas=2) as supervisor:
            driver.errors["stop"] = [GcsError("no GCS"), GcsError("no GCS")]
            driver.kill(FIRST)
            (problem,) = await eventually(lambda: supervisor.status()["problems"])
            assert "the end of smollm2-0 failed" in problem and "no GCS" in problem
            await eventually(lambda: SECOND in driver.replicas and supervisor.reconciler.ready)
            assert _stopped(driver) == [FIRST], "of smollm2-0, and of no other replica"
            calls = [call for call in driver.calls if call[1].replica_id == "smollm2-0"]
            assert calls == [("launch", FIRST), ("stop", FIRST), ("launch", SECOND)]

    asyncio.run(scenario())


def test_a_replica_that_cannot_be_placed_waits_and_the_others_serve(driver: FakeDriver, eventually: Eventually) -> None:
    """Also of adopted ones: before, one of them ended the whole cluster."""
    driver.without_place.add("smollm2-1")
    driver.add_earlier_build(ReplicaName("smollm2-0", 3))

    async def scenario() -> None:
        supervisor = Supervisor(
            parse_spec({"models": [{"replicas": 2}], "health": HEALTH}),
            driver,
            Membership(),
            partial(watch_health, MEMBER),
        )
        await supervisor.adopt(None)
        supervisor.start()
        entry = lambda: supervisor.status()["replicas"][1]  # noqa: E731
        await eventually(lambda: entry()["state"] == "pending")
        assert entry()["note"] == "waiting for a place: smollm2-1 needs 1 GPU"
        assert supervisor.overview.progress()["smollm2-1"].stage == entry()["note"]
        await asyncio.sleep(0.5)
        assert supervisor.reconciler.fatal == "" and _stopped(driver) == []
        assert supervisor.status()["replicas"][0]["state"] == "ready"
        driver.process_gate.clear()
        driver.without_place.clear()
        await eventually(lambda: (entry()["state"], entry()["note"]) == ("starting", "waiting for its processes"))
        driver.process_gate.set()
        await eventually(lambda: supervisor.reconciler.ready)
        assert entry()["note"] == ""
        await supervisor.stop()

    asyncio.run(scenario())


def test_an_unexpected_error_of_a_start_is_tried_again(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _running(driver, eventually, replicas=2) as supervisor:
            driver.errors["launch"] = [GcsError("no GCS"), GcsError("no GCS")]
            driver.kill(FIRST)
            await eventually(lambda: "no GCS" in supervisor.status()["replicas"][0]["note"])
            await eventually(lambda: supervisor.reconciler.ready)
            assert supervisor.reconciler.fatal == "" and ReplicaName("smollm2-1", 1) in driver.replicas

    asyncio.run(scenario())


def test_an_error_with_a_health_message_does_not_end_the_watch(
    driver: FakeDriver, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the watch the replica would be silent, and replaced."""

    async def scenario() -> None:
        async with _running(driver, eventually) as supervisor:
            failed: list[int] = []

            class Failing(dict[int, Any]):
                def get(self, key: int, default: Any = None) -> Any:
                    monkeypatch.setattr(USED_STATES, STATES)
                    failed.append(key)
                    raise ValueError("a bug")

            monkeypatch.setattr(USED_STATES, Failing())
            await eventually(lambda: failed == [replica_pb2.REPLICA_STATE_READY])
            await asyncio.sleep(1.2)
            assert supervisor.reconciler.ready and _stopped(driver) == []

    asyncio.run(scenario())


def test_pauses_grow_up_to_a_limit_and_spread() -> None:
    backoff = Backoff(1.0, 30.0)
    assert [backoff.seconds(failures, lambda: 0.0) for failures in (1, 2, 3, 6, 10_000)] == [1, 2, 4, 30, 30]
    assert backoff.seconds(6, lambda: 1.0) == 15

"""The loop over a driver with fake replicas: what it shows and lists, and that no failed call ends a replica."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest

from headrace_base.cluster_member import NO_PROXY
from headrace_base.errors import ListenError
from headrace_cluster.controller import control_loop
from headrace_cluster.controller.control_service import start_control_server
from headrace_cluster.controller.members import member_list
from headrace_cluster.controller.operations import DrainBody, replica_operations
from headrace_cluster.core.backoff import Backoff
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.words import Words
from headrace_proto import control_pb2, control_pb2_grpc, replica_pb2
from support.cluster.fake_driver import FakeDriver
from support.cluster.fake_loop import Controlled, controlled
from support.members import MEMBER, METADATA

Eventually = Callable[..., Awaitable[Any]]

FIRST, SECOND = (ReplicaName("smollm2-0", generation) for generation in (1, 2))


class GcsError(Exception):
    """What a call of Ray raises when its GCS does not answer."""


@pytest.fixture(autouse=True)
def _fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control_loop, "REPEAT", Backoff(0.05, 0.1))
    monkeypatch.setattr(control_loop, "SEEN_SECONDS", 0.2)
    monkeypatch.setattr(control_loop, "NOTE_SECONDS", 0.1)
    monkeypatch.setattr(control_loop, "FIRST_SECONDS", 0.5)


def test_status_and_stop(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with controlled(driver, replicas=2) as control:
            await eventually(lambda: control.planner.ready)
            driver.replicas[FIRST].running = 3
            await eventually(lambda: control.status()["replicas"][0]["load"]["running"] == 3)
            document = json.loads(json.dumps(control.status()))
            replica = document["replicas"][0]
            assert {key: replica[key] for key in ("id", "model", "revision", "role", "state", "ranks")} == {
                "id": "smollm2-0",
                "model": "smollm2",
                "revision": "r1",
                "role": "both",
                "state": "ready",
                "ranks": [{"rank": 0, "pid": 1001, "node": "here", "device": "cpu"}],
            }
            assert set(replica["load"]) == {"running", "waiting", "kv_usage"}
            assert [entry["id"] for entry in document["replicas"]] == ["smollm2-0", "smollm2-1"]
            stopping = asyncio.create_task(control.loop.stop())
            await eventually(lambda: control.states() == ["draining", "draining"] or len(driver.ranks) == 1)
            await asyncio.sleep(0.2)
            assert FIRST in driver.ranks, "it has a request in flight"
            driver.replicas[FIRST].running = 0
            await asyncio.wait_for(stopping, 3)
        assert driver.ranks == driver.groups == {}

    asyncio.run(scenario())


def test_a_killed_replica_is_removed_from_the_list_and_built_again(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with controlled(driver) as control:
            lists = control.membership.watch()
            await eventually(lambda: control.planner.ready)
            first = await _until(lists, lambda members: _ready(members) == [1])
            driver.kill(FIRST)
            await _until(lists, lambda members: _ready(members) == [])
            again = await _until(lists, lambda members: _ready(members) == [2])
            assert again.epoch == first.epoch and again.version > first.version
            assert again.members[0].address != first.members[0].address
            assert [(entry.name, list(entry.aliases)) for entry in again.models] == [("smollm2", ["small"])]
            # The old build is ended before the new one is placed: both need the same memory.
            calls = [call for call in driver.calls if call[0] in ("place", "end")]
            assert calls[:3] == [("place", FIRST), ("end", FIRST), ("place", SECOND)]

    asyncio.run(scenario())


def test_a_router_watches_and_what_it_hears_counts(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with controlled(driver) as control:
            server, port = await start_control_server(control.membership, MEMBER, "127.0.0.1", 0)
            with pytest.raises(ListenError, match="--control-port"):
                await start_control_server(control.membership, MEMBER, "127.0.0.1", port)
            await eventually(lambda: control.planner.ready)
            replica = control_pb2.HeardReplica(replica_id="smollm2-0", generation=1, heard=True)
            report = control_pb2.RouterReport(router_id="r-1", replicas=[replica])
            async with MEMBER.channel(f"127.0.0.1:{port}", NO_PROXY) as channel:
                stub: Any = control_pb2_grpc.ControlStub(channel)
                router = control_pb2.RouterInfo(id="r-1", pid=7, http="127.0.0.1:1", grpc="127.0.0.1:2")
                call = stub.Watch(control_pb2.WatchRequest(router=router), metadata=METADATA)
                assert (await call.read()).members[0].identity.replica_id == "smollm2-0"
                assert [entry["id"] for entry in control.status()["routers"]] == ["r-1"]

                async def keep_reporting() -> None:
                    while True:
                        await stub.Report(report, metadata=METADATA)
                        await asyncio.sleep(0.1)

                reporting = asyncio.create_task(keep_reporting())
                driver.replicas[FIRST].health_paused.set()
                await eventually(lambda: "routers receive from it" in control.status()["replicas"][0]["note"])
                assert control.states() == ["ready"] and not driver.named("end")
                report.replicas[0].heard = False
                await eventually(lambda: SECOND in driver.ranks)
                reporting.cancel()
                call.cancel()
                await eventually(lambda: control.status()["routers"] == [])
            await server.stop(0)

    asyncio.run(scenario())


# -- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["look", "place", "fill", "watch", "secret", "end", "save"])
def test_a_call_that_fails_is_repeated_and_shown_and_ends_nothing(
    driver: FakeDriver, eventually: Eventually, method: str
) -> None:
    async def scenario() -> None:
        async with controlled(driver, replicas=2) as control:
            await eventually(lambda: control.planner.ready)
            driver.errors[method] = [GcsError("no GCS"), GcsError("no GCS")]
            driver.kill(FIRST)
            await eventually(lambda: any("no GCS" in problem for problem in control.status()["problems"]))
            await eventually(lambda: not driver.errors[method] and control.planner.ready and SECOND in driver.ranks)
            assert set(driver.named("end")) == {FIRST}, "of smollm2-0, and of no other replica"
            if method != "watch":  # which goes on
                await eventually(lambda: control.status()["problems"] == [])

    asyncio.run(scenario())


def test_a_turn_that_fails_is_repeated(
    driver: FakeDriver, eventually: Eventually, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario() -> None:
        async with controlled(driver, replicas=2) as control:
            await eventually(lambda: control.planner.ready)
            decide = control.planner.actions

            def fail(now: float) -> list[Any]:
                raise KeyError("a bug")

            monkeypatch.setattr(control.planner, "actions", fail)
            (problem,) = await eventually(lambda: control.status()["problems"])
            assert "a turn of the controller failed" in problem and not driver.named("end")
            driver.kill(FIRST)
            monkeypatch.setattr(control.planner, "actions", decide)
            await eventually(lambda: SECOND in driver.replicas and control.planner.ready)

    asyncio.run(scenario())


def test_the_next_controller_takes_up_what_runs(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        first = Controlled(driver, replicas=2)
        await first.loop.open()
        first.loop.start()
        driver.start_gate.clear()
        await eventually(lambda: len(driver.named("secret")) == 2)
        first.die()
        driver.start_gate.set()
        await eventually(lambda: all(rank.report.started for rank in driver.ranks.values()))
        async with controlled(driver, words=first.words, replicas=2) as second:
            await eventually(lambda: second.planner.ready)
            assert len(driver.named("place")) == 2 and not driver.named("end"), "they became ready without a controller"
            second.die()
            driver.unresponsive = {FIRST}
            third = Controlled(driver, second.words, replicas=2)
            assert await third.loop.open() == (1, 0)
            members, _ = member_list(third.loop.spec, 0, third.planner)
            assert sorted(bool(member.address) for member in members) == [False, True], "routers keep the other one"

    asyncio.run(scenario())


def test_a_lost_record_is_shown_until_an_operator_says_something(driver: FakeDriver, eventually: Eventually) -> None:
    """Replicas run, and no record says what operators changed before."""

    def problems(control: Controlled) -> str:
        return " ".join(control.status()["problems"])

    async def scenario() -> None:
        first = Controlled(driver, replicas=2)
        await first.loop.open()
        first.loop.start()
        await eventually(lambda: first.planner.ready)
        assert problems(first) == ""
        first.die()
        second = Controlled(driver, Words(), replicas=2)
        await second.loop.open()
        second.loop.start()
        assert "record in Ray's GCS was lost" in problems(second) and "drained replicas" in problems(second)
        await eventually(lambda: second.saved)
        second.die()
        async with controlled(driver, second.words, replicas=2) as third:
            assert "was lost" in problems(third), "the next controller shows it, too"
            (drain,) = (each for each in replica_operations(third.loop, third.membership) if each.path == "/drain")
            await drain.run(DrainBody(replica="smollm2-1", force=True))
            assert problems(third) == ""

    asyncio.run(scenario())


@pytest.mark.parametrize(("generation", "lost"), [(1, False), (7, True)])
def test_routers_that_receive_from_unknown_replicas_show_that_a_record_was_lost(
    driver: FakeDriver, eventually: Eventually, generation: int, lost: bool
) -> None:
    """Ray's head has lost its storage, and its ranks with it; routers still receive from some of them."""

    async def scenario() -> None:
        async with controlled(driver) as control:
            await eventually(lambda: control.planner.ready)
            heard = control_pb2.HeardReplica(replica_id="smollm2-0", generation=generation, heard=True)
            control.membership.report(control_pb2.RouterReport(router_id="r", replicas=[heard]))
            control.loop._find_lost_record()
            assert bool(control.status()["problems"]) is lost

    asyncio.run(scenario())


# -- documents ------------------------------------------------------------------------------------------------------


async def _until(
    lists: AsyncIterator[control_pb2.MemberList], condition: Callable[[control_pb2.MemberList], bool]
) -> control_pb2.MemberList:
    async with asyncio.timeout(20):
        async for members in lists:
            if condition(members):
                return members
    raise AssertionError


def _ready(members: control_pb2.MemberList) -> list[int]:
    ready = replica_pb2.REPLICA_STATE_READY
    return [member.identity.generation for member in members.members if member.state == ready]

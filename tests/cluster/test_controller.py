"""Supervisor, member list, Control/Watch and admin API, with fake replicas in this process."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import pytest

from headrace_cluster.controller.admin import admin_app, listen
from headrace_cluster.controller.control_service import start_control_server
from headrace_cluster.controller.health import watch_health
from headrace_cluster.controller.members import Membership
from headrace_cluster.controller.operations import Operation, ProfileBody
from headrace_cluster.controller.supervisor import Supervisor
from headrace_cluster.core.driver import StartFailedError
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.rank_config import ProfileOutcome
from headrace_cluster.core.record import State
from headrace_cluster.errors import ProfileError
from headrace_cluster.spec.cluster_spec import parse_spec
from headrace_proto import control_pb2, control_pb2_grpc, replica_pb2
from headrace_proto.channel_options import NO_PROXY
from headrace_proto.errors import ListenError
from headrace_worker.profiling.report import Operator, ProfileReport
from support.cluster.fake_driver import FakeDriver
from support.members import MEMBER, METADATA

Eventually = Callable[..., Awaitable[Any]]

HEALTH = {
    "interval_seconds": 0.05,
    "silence_seconds": 0.3,
    "replace_seconds": 0.4,
    "drain_seconds": 2,
    "start_seconds": 20,
}
LOOPBACK = "127.0.0.1:8002"
FIRST = ReplicaName("smollm2-0", 1)
SECOND = ReplicaName("smollm2-0", 2)


@asynccontextmanager
async def _supervised(driver: FakeDriver, replicas: int = 1) -> AsyncIterator[tuple[Supervisor, Membership]]:
    spec = parse_spec({"models": [{"replicas": replicas, "aliases": ["small"]}], "health": HEALTH})
    membership = Membership()
    supervisor = Supervisor(spec, driver, membership, partial(watch_health, MEMBER))
    supervisor.start()
    try:
        yield supervisor, membership
    finally:
        await supervisor.stop()


def test_start_status_and_stop(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _supervised(driver, replicas=2) as (supervisor, _):
            await eventually(lambda: supervisor.reconciler.ready)
            driver.replicas[FIRST].running = 3
            await eventually(lambda: supervisor.status()["replicas"][0]["load"]["running"] == 3)
            document = json.loads(json.dumps(supervisor.status()))
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
            assert set(supervisor.overview.started()) == {"smollm2-0", "smollm2-1"}
            driver.replicas[FIRST].running = 0
        assert driver.replicas == {}

    asyncio.run(scenario())


def test_a_killed_replica_is_removed_from_the_list_and_rebuilt(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _supervised(driver) as (supervisor, membership):
            lists = membership.watch()
            await eventually(lambda: supervisor.reconciler.ready)
            first = await _until(lists, lambda members: _ready(members) == [1])
            driver.kill(FIRST)
            await _until(lists, lambda members: _ready(members) == [])
            again = await _until(lists, lambda members: _ready(members) == [2])
            assert again.epoch == first.epoch and again.version > first.version
            assert again.members[0].address != first.members[0].address
            assert [(entry.name, list(entry.aliases)) for entry in again.models] == [("smollm2", ["small"])]
            # The old build is ended before the new one is placed: both need the same memory.
            calls = [call for call in driver.calls if call[0] in ("launch", "stop")]
            assert calls[:3] == [("launch", FIRST), ("stop", FIRST), ("launch", SECOND)]

    asyncio.run(scenario())


def test_a_replica_without_health_is_replaced(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _supervised(driver, 2) as (supervisor, _):
            await eventually(lambda: supervisor.reconciler.ready)
            record, other = supervisor.reconciler.records.values()
            await eventually(lambda: record.last_health > other.up_since)  # else the other one is no witness
            replica = driver.replicas[FIRST]
            replica.health_paused.set()
            await eventually(lambda: record.state is State.UNHEALTHY)
            assert "no health message" in supervisor.status()["replicas"][0]["note"]
            replica.health_paused.clear()
            await eventually(lambda: supervisor.reconciler.ready)
            assert record.generation == 1
            replica.health_paused.set()
            await eventually(lambda: record.generation == 2 and supervisor.reconciler.ready)
            assert ("stop", FIRST) in driver.calls and FIRST not in driver.replicas

    asyncio.run(scenario())


def test_a_replica_that_only_routers_hear_is_kept(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _supervised(driver) as (supervisor, membership):
            server, port = await start_control_server(membership, MEMBER, "127.0.0.1", 0)
            await eventually(lambda: supervisor.reconciler.ready)
            driver.replicas[FIRST].health_paused.set()
            replica = control_pb2.HeardReplica(replica_id="smollm2-0", generation=1, heard=True)
            report = control_pb2.RouterReport(router_id="r-1", replicas=[replica])
            async with MEMBER.channel(f"127.0.0.1:{port}", NO_PROXY) as channel:
                stub: Any = control_pb2_grpc.ControlStub(channel)

                async def keep_reporting() -> None:
                    while True:
                        await stub.Report(report, metadata=METADATA)
                        await asyncio.sleep(0.1)

                reporting = asyncio.create_task(keep_reporting())
                await eventually(lambda: "routers receive from it" in supervisor.status()["replicas"][0]["note"])
                await asyncio.sleep(1)
                assert supervisor.status()["replicas"][0]["state"] == "ready" and driver.calls == [("launch", FIRST)]
                report.replicas[0].heard = False
                await eventually(lambda: SECOND in driver.replicas)
                reporting.cancel()
            await server.stop(0)

    asyncio.run(scenario())


def test_a_failed_first_start_is_fatal(driver: FakeDriver, eventually: Eventually) -> None:
    driver.failures = [StartFailedError("too little memory", final=True)]

    async def scenario() -> None:
        async with _supervised(driver) as (supervisor, _):
            await eventually(lambda: supervisor.reconciler.fatal == "too little memory")
            assert supervisor.status()["replicas"][0]["note"] == "too little memory"

    asyncio.run(scenario())


def test_stop_waits_for_requests_in_flight(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _supervised(driver) as (supervisor, _):
            await eventually(lambda: supervisor.reconciler.ready)
            replica = driver.replicas[FIRST]
            replica.running = 1
            await eventually(lambda: supervisor.status()["replicas"][0]["load"]["running"] == 1)
            stopping = asyncio.create_task(supervisor.stop())
            await eventually(lambda: replica.draining)
            await eventually(lambda: supervisor.status()["replicas"][0]["state"] == "draining")
            await asyncio.sleep(0.3)
            assert ("stop", FIRST) not in driver.calls
            replica.running = 0
            await asyncio.wait_for(stopping, 1.5)
            assert ("stop", FIRST) in driver.calls

    asyncio.run(scenario())


def test_watch_registers_the_router(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _supervised(driver) as (supervisor, membership):
            server, port = await start_control_server(membership, MEMBER, "127.0.0.1", 0)
            with pytest.raises(ListenError, match="--control-port"):
                await start_control_server(membership, MEMBER, "127.0.0.1", port)
            async with MEMBER.channel(f"127.0.0.1:{port}", NO_PROXY) as channel:
                stub: Any = control_pb2_grpc.ControlStub(channel)
                router = control_pb2.RouterInfo(id="r-1", pid=7, http="127.0.0.1:1", grpc="127.0.0.1:2")
                request = control_pb2.WatchRequest(router=router)
                call = stub.Watch(request, metadata=METADATA)
                members = await call.read()
                while not _ready(members):
                    members = await call.read()
                assert members.members[0].identity.replica_id == "smollm2-0"
                assert [entry["id"] for entry in supervisor.status()["routers"]] == ["r-1"]
                call.cancel()
                await eventually(lambda: supervisor.status()["routers"] == [])
            await server.stop(0)

    asyncio.run(scenario())


def test_admin_needs_key_and_host() -> None:
    stopped: list[bool] = []

    def stop() -> None:
        stopped.append(True)

    async def profile(body: ProfileBody) -> dict[str, Any]:
        if body.replica == "busy":
            raise ProfileError("a profile is being recorded")
        return {"asked": [body.replica, body.steps, body.seconds]}

    operations = [Operation("/profile", ProfileBody, profile)]
    app = admin_app(lambda: [b"the-key"], {"/status": lambda: {"replicas": [], "routers": []}}, stop, operations)
    good = {"Authorization": "Bearer the-key"}

    async def send(
        method: str, path: str, headers: dict[str, str], host: str = LOOPBACK, content: str = ""
    ) -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url=f"http://{host}") as client:
            return await client.request(method, path, headers=headers, content=content)

    async def scenario() -> None:
        for path in ("/status", "/stop", "/profile", "/nothing", "/docs", "/openapi.json"):
            for method in ("GET", "POST", "OPTIONS"):
                for headers in ({}, {"Authorization": "Bearer the-kez"}, {"Authorization": "the-key"}):
                    answer = await send(method, path, headers)
                    assert answer.status_code == 401 and "message" in answer.json()["error"]
                assert (await send(method, path, good, host="evil.example:8002")).status_code == 403
        assert stopped == []
        for host in ("localhost:8002", "[::1]:8002", "127.0.0.1"):
            assert (await send("GET", "/status", good, host)).json() == {"replicas": [], "routers": []}
        answer = await send("GET", "/status", good | {"Origin": "http://evil.example"})
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert (await send("GET", "/stop", good)).status_code == 405
        assert (await send("POST", "/profile", good)).json() == {"asked": [None, 20, 10.0]}
        content = '{"replica": "m-1", "steps": 3, "seconds": 2.5}'
        assert (await send("POST", "/profile", good, content=content)).json() == {"asked": ["m-1", 3, 2.5]}
        answer = await send("POST", "/profile", good, content='{"replica": "busy"}')
        assert (answer.status_code, answer.json()["error"]["message"]) == (409, "a profile is being recorded")
        for body, word in (('{"steps": "many"}', "steps"), ('{"folder": "/etc"}', "folder"), ("[", "json")):
            answer = await send("POST", "/profile", good, content=body)
            assert answer.status_code == 400 and word in answer.json()["error"]["message"]
        assert (await send("GET", "/nothing", good)).status_code == 404
        assert (await send("POST", "/stop", good)).status_code == 202
        assert stopped == [True]

    asyncio.run(scenario())


def test_a_profile_of_the_selected_replica(driver: FakeDriver, eventually: Eventually) -> None:
    operators = [Operator("aten::mm", 12, 3.4567, 0.75, False)]
    report = ProfileReport("/profiles/smollm2-0-g1-r0.trace.json.gz", 4, 0.25, operators, "4 of 9 steps")

    async def scenario() -> None:
        async with _supervised(driver) as (supervisor, _):
            with pytest.raises(ProfileError, match=r"smollm2-0 is .*: ask again when it is ready"):
                await supervisor.profiles.record(None, 4, 1.0)
            await eventually(lambda: supervisor.reconciler.ready)
            driver.profiles = [ProfileOutcome(report)]
            document = json.loads(json.dumps(await supervisor.profiles.record(None, 4, 1.0)))
            trace = {
                "rank": 0,
                "node": "here",
                "path": report.path,
                "steps": 4,
                "seconds": 0.25,
                "note": "4 of 9 steps",
            }
            assert (document["id"], document["generation"], document["traces"]) == ("smollm2-0", 1, [trace])
            (operator,) = document["operators"]
            assert (operator["name"], operator["milliseconds"], operator["share"]) == ("aten::mm", 3.457, 0.75)
            driver.profiles = [ProfileOutcome(error="serve with --profile DIR")]
            with pytest.raises(ProfileError, match="--profile DIR"):
                await supervisor.profiles.record("smollm2-0", 4, 1.0)
            with pytest.raises(ProfileError, match=r"no replica 'other'.*smollm2-0"):
                await supervisor.profiles.record("other", 4, 1.0)
            assert driver.calls.count(("profile", FIRST)) == 2

    asyncio.run(scenario())


def test_with_several_replicas_one_must_be_named(driver: FakeDriver, eventually: Eventually) -> None:
    async def scenario() -> None:
        async with _supervised(driver, replicas=2) as (supervisor, _):
            await eventually(lambda: supervisor.reconciler.ready)
            with pytest.raises(ProfileError, match="smollm2-0, smollm2-1"):
                await supervisor.profiles.record(None, 4, 1.0)

    asyncio.run(scenario())


def test_the_admin_port_is_not_shared() -> None:
    bound = listen("127.0.0.1", 0)
    bound.listen()
    with pytest.raises(ListenError, match="--admin-port"):
        listen("127.0.0.1", bound.getsockname()[1])
    bound.close()


def _ready(members: control_pb2.MemberList) -> list[int]:
    return [m.identity.generation for m in members.members if m.state == replica_pb2.REPLICA_STATE_READY]


async def _until(
    lists: AsyncIterator[control_pb2.MemberList], condition: Callable[[control_pb2.MemberList], bool]
) -> control_pb2.MemberList:
    async with asyncio.timeout(8):
        async for members in lists:
            if condition(members):
                return members
    raise AssertionError("the list ended")

"""A controller together with ranks, replicas and routers of the release before, or of the next one
(docs/reliability.md I20).
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from typing import Any

import msgspec
import pytest

from headrace_cluster.controller.control_service import ControlService, start_control_server
from headrace_cluster.controller.health import watch_health
from headrace_cluster.controller.members import Membership
from headrace_cluster.controller.supervisor import Supervisor
from headrace_cluster.core.adoption import choose_builds
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.rank_config import RankReport
from headrace_cluster.core.snapshot import ControllerSnapshot, Keeper
from headrace_cluster.spec.cluster_spec import parse_spec
from headrace_proto import control_pb2, replica_pb2
from headrace_proto.component import Component
from headrace_proto.control_pb2_grpc import ControlStub
from headrace_proto.identity import Identity
from headrace_router.core.account import AccountTable
from headrace_router.core.fleet import Fleet
from headrace_router.core.replica_state import ReplicaState
from headrace_router.replicas.membership import watch_controller
from headrace_router.replicas.router_certificate import RouterCertificate
from support import identities
from support.cluster.fake_driver import FakeDriver
from support.cluster.fake_replica import FakeReplica
from support.other_release import earlier, later

Eventually = Callable[..., Awaitable[Any]]

MEMBER = control_pb2.Member(
    identity=replica_pb2.ReplicaIdentity(replica_id="m-0", generation=3, model="m"),
    address="127.0.0.1:1",
    state=replica_pb2.REPLICA_STATE_READY,
)

# As a rank of the release before encodes it; a field is never removed, and a new one has a default.
STARTED: dict[str, Any] = {
    "model": "m", "address": "127.0.0.1:1", "boot_id": b"", "pid": 7, "device": "cpu", "dtype": "float32",
    "revision": "", "threads": 1, "tp": 1, "pp": 1, "max_model_len": 1, "max_num_seqs": 1,
    "max_num_batched_tokens": 1, "kv_blocks": 1, "kv_bytes": 1, "block_size": 1, "weight_bytes": 1, "defaults": {},
    "notes": [],
}  # fmt: skip
REPORT: dict[str, Any] = {
    "pid": 7, "node": "here", "gpus": [], "fingerprint": b"before", "authorities": [b"ours"], "model": "m", "tp": 1,
    "pp": 1, "role": "both", "started": STARTED, "draining": False, "ended": False, "log_path": "",
}  # fmt: skip
REPLICA: dict[str, Any] = {
    "generation": 1, "role": "both", "held": False, "built": 1, "rolling": False, "surging": False,
    "drain_seconds": None, "ever_ready": True,
}  # fmt: skip
NEW: dict[str, Any] = {"a field of the next release": [1, 2]}


@pytest.mark.parametrize("new", [{}, NEW], ids=["before", "next"])
def test_ranks_of_another_release_are_adopted(new: dict[str, Any]) -> None:
    """They serve on until their turn to be built again."""
    encoded = msgspec.msgpack.encode(REPORT | new | {"started": STARTED | new})
    report = msgspec.msgpack.decode(encoded, type=RankReport)
    (build,) = choose_builds({(ReplicaName("m-0", 1), 0): report}, {"m-0": b"of this release"}, [b"ours"])
    assert not build.same and not build.draining and build.started.address == STARTED["address"]


@pytest.mark.parametrize("new", [{}, NEW], ids=["before", "next"])
def test_the_record_of_another_release_is_read(new: dict[str, Any]) -> None:
    encoded = msgspec.msgpack.encode({"created": 5, "replicas": {"m-0": REPLICA | new}} | new)
    assert msgspec.msgpack.decode(encoded, type=ControllerSnapshot).replicas["m-0"].generation == 1
    encoded = msgspec.msgpack.encode({"id": "k", "control_port": 1, "admin_port": 2} | new)
    assert msgspec.msgpack.decode(encoded, type=Keeper).admin_port == 2


@pytest.mark.parametrize("release", [-1, 1])
def test_replicas_of_another_release_are_ready(
    driver: FakeDriver, identity: Identity, eventually: Eventually, monkeypatch: pytest.MonkeyPatch, release: int
) -> None:
    report = FakeReplica._health

    def health(self: FakeReplica, step: int) -> replica_pb2.ReplicaHealth:
        return later(report(self, step)) if release > 0 else earlier(report(self, step), "load")

    monkeypatch.setattr(FakeReplica, "_health", health)
    names = [ReplicaName("smollm2-0", 3), ReplicaName("smollm2-1", 1)]
    spec = parse_spec({"models": [{"replicas": 2}], "health": {"interval_seconds": 0.05}})

    async def scenario() -> None:
        for name in names:
            driver.add_earlier_build(name)
        supervisor = Supervisor(spec, driver, Membership(), partial(watch_health, identity))
        await supervisor.adopt(None)
        supervisor.start()
        await eventually(lambda: all(build.health for build in supervisor._builds.values()))
        assert supervisor.reconciler.ready and [call for call, _ in driver.calls if call == "launch"] == []
        await supervisor.stop()

    asyncio.run(scenario())


class _Link:
    """A link without a connection."""

    def __init__(self, member: control_pb2.Member) -> None:
        self.state: ReplicaState[Any] = ReplicaState(
            member, clock=lambda: 0.0, new_id=lambda: b"x", on_send=lambda: None
        )

    def close(self) -> None:
        return

    def check_stall(self) -> None:
        return


async def _controller(membership: Membership) -> tuple[Any, str]:
    await membership.publish([MEMBER], [control_pb2.ModelEntry(name="m", created=5)])
    server, port = await start_control_server(membership, identities.controller(), identities.authority, "127.0.0.1", 0)
    return server, f"127.0.0.1:{port}"


@pytest.mark.parametrize("release", [-1, 1])
def test_a_router_uses_the_list_of_a_controller_of_another_release(
    eventually: Eventually, monkeypatch: pytest.MonkeyPatch, release: int
) -> None:
    watch, report = ControlService.Watch, ControlService.Report

    async def watch_other(self: Any, request: Any, context: Any) -> AsyncIterator[control_pb2.MemberList]:
        async for members in watch(self, request, context):
            yield later(members) if release > 0 else earlier(members, "epoch")

    async def report_other(self: Any, request: Any, context: Any) -> control_pb2.RouterReportReply:
        reply = await report(self, request, context)
        return later(reply) if release > 0 else earlier(reply, "authorities")

    monkeypatch.setattr(ControlService, "Watch", watch_other)
    monkeypatch.setattr(ControlService, "Report", report_other)
    fleet: Fleet[Any] = Fleet(_Link, 0, clock=lambda: 0.0, jitter=lambda: 0.0)

    async def scenario() -> None:
        membership = Membership()
        server, address = await _controller(membership)
        info = control_pb2.RouterInfo(id="r-1")
        router = asyncio.create_task(
            watch_controller(address, info, RouterCertificate(identities.router()), fleet, AccountTable())
        )
        await eventually(lambda: fleet.replicas)
        await eventually(
            lambda: membership.router_reports.receives(ReplicaName("m-0", 3), membership._clock()) is False
        )
        assert [state.build for state in fleet.replicas] == [("m-0", 3)] and not router.done()
        router.cancel()
        await server.stop(0)

    asyncio.run(scenario())


@pytest.mark.parametrize("release", [-1, 1])
def test_a_controller_serves_routers_of_another_release(eventually: Eventually, release: int) -> None:
    info = control_pb2.RouterInfo(id="r-1")
    watch = control_pb2.WatchRequest(router=info)
    heard = [control_pb2.HeardReplica(replica_id="m-0", generation=3, heard=True)]
    report = control_pb2.RouterReport(router_id="r-1", replicas=heard)
    other = later if release > 0 else earlier

    async def scenario() -> None:
        membership = Membership()
        server, address = await _controller(membership)
        async with identities.router().channel(address, Component.CONTROLLER) as channel:
            stub: Any = ControlStub(channel)
            stream = stub.Watch(other(watch))
            members = await stream.read()
            assert [member.address for member in members.members] == [MEMBER.address]
            assert [router.id for router in membership.routers.values()] == ["r-1"]
            if release > 0:  # the release before may not report at all
                await stub.Report(later(report))
                assert membership.router_reports.receives(ReplicaName("m-0", 3), membership._clock()) is True
            stream.cancel()
        await server.stop(0)

    asyncio.run(scenario())

"""What a router tells its controller, and what it makes of the controller's list."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from structlog.testing import capture_logs

from headrace_proto.control_pb2 import (
    Member,
    MemberList,
    ModelPlacement,
    RouterInfo,
    RouterReport,
    RouterReportReply,
)
from headrace_proto.control_pb2_grpc import ControlServicer, add_ControlServicer_to_server
from headrace_proto.replica_pb2 import (
    REPLICA_STATE_DEAD,
    REPLICA_STATE_DRAINING,
    REPLICA_STATE_READY,
    REPLICA_STATE_UNHEALTHY,
    Load,
    ModelFacts,
    ReplicaFrame,
    ReplicaIdentity,
)
from headrace_proto.stall import STALL_SECONDS
from headrace_router.core.account import AccountTable
from headrace_router.core.fleet import Fleet
from headrace_router.core.replica_state import ReplicaState
from headrace_router.replicas.membership import watch_controller
from support.members import MEMBER

IDENTITY = ReplicaIdentity(replica_id="m-0", generation=3)


class _Link:
    """A link without a connection."""

    def __init__(self, member: Member, clock: Any) -> None:
        self.state: ReplicaState[Any] = ReplicaState(member, clock=clock, new_id=lambda: b"x", on_send=lambda: None)

    def close(self) -> None:
        return

    def check_stall(self) -> None:
        return


class _Bench:
    """A fleet whose replicas are heard as the test has it."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fleet: Fleet[Any] = Fleet(
            lambda member: _Link(member, lambda: self.now), 0, clock=lambda: self.now, jitter=lambda: 0.0
        )

    def list(self, state: int) -> ReplicaState[Any]:
        member = Member(identity=IDENTITY, address="127.0.0.1:1", state=state)  # type: ignore[arg-type]
        self.fleet.update(MemberList(members=[member]))
        return self.fleet.replicas[0]

    def hear(self, step: int = 1) -> None:
        (replica,) = self.fleet.replicas
        replica.describe(ModelFacts(identity=IDENTITY), None)
        replica.receive(ReplicaFrame(hello=IDENTITY, step=step))


@pytest.mark.parametrize("listed", [REPLICA_STATE_READY, REPLICA_STATE_UNHEALTHY])
def test_a_replica_that_is_heard_takes_requests_whatever_its_listed_health(listed: int) -> None:
    """The controller may be cut off, and list every replica as unhealthy."""
    bench = _Bench()
    replica = bench.list(REPLICA_STATE_READY)
    assert not replica.ready and not replica.heard
    bench.hear()
    assert replica.ready and replica.heard
    assert bench.list(listed).ready
    bench.now = STALL_SECONDS + 1
    assert not replica.ready and not replica.heard


def test_a_replica_that_drains_or_is_gone_takes_no_requests() -> None:
    bench = _Bench()
    replica = bench.list(REPLICA_STATE_READY)
    bench.hear()
    assert not bench.list(REPLICA_STATE_DRAINING).ready
    assert bench.list(REPLICA_STATE_UNHEALTHY).ready
    replica.receive(ReplicaFrame(step=2, load=Load(draining=True)))
    assert not replica.ready
    bench.fleet.update(MemberList(members=[Member(identity=IDENTITY, address="a", state=REPLICA_STATE_DEAD)]))
    assert not replica.ready


class _Controller(ControlServicer):
    def __init__(self) -> None:
        self.reports: list[RouterReport] = []
        self.enough = asyncio.Event()

    async def Watch(self, request: Any, context: Any) -> AsyncIterator[MemberList]:
        yield MemberList(members=[Member(identity=IDENTITY, address="127.0.0.1:1", state=REPLICA_STATE_READY)])
        await asyncio.sleep(60)

    async def Report(self, request: RouterReport, context: Any) -> RouterReportReply:
        self.reports.append(request)
        if len(self.reports) == 3:
            self.enough.set()
        return RouterReportReply()


async def _watched(controller: _Controller, bench: _Bench) -> None:
    server = MEMBER.server(())
    add_ControlServicer_to_server(controller, server)
    port = MEMBER.listen(server, "127.0.0.1:0")
    await server.start()
    watch = asyncio.create_task(
        watch_controller(
            f"127.0.0.1:{port}",
            RouterInfo(id="r-1"),
            MEMBER,
            bench.fleet,
            AccountTable(),
            lambda: [ModelPlacement(model="m", prompt_tokens=9)],
        )
    )
    try:
        async with asyncio.timeout(20):
            while not (bench.fleet.replicas and bench.fleet.replicas[0].connected):
                await asyncio.sleep(0.05)
                if bench.fleet.replicas:
                    bench.hear()
            await controller.enough.wait()
    finally:
        watch.cancel()
        await server.stop(0)


def test_a_router_reports_what_it_hears() -> None:
    controller, bench = _Controller(), _Bench()
    asyncio.run(_watched(controller, bench))
    last = controller.reports[-1]
    assert last.router_id == "r-1"
    assert [(entry.replica_id, entry.generation, entry.heard) for entry in last.replicas] == [("m-0", 3, True)]


def test_a_router_that_never_had_a_list_is_told_what_to_check() -> None:
    async def watched() -> None:
        bench = _Bench()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1):
                await watch_controller("127.0.0.1:1", RouterInfo(id="r-1"), MEMBER, bench.fleet, AccountTable(), list)

    with capture_logs() as logs:
        asyncio.run(watched())
    assert ["check --controller" in entry["event"] for entry in logs] == [True]

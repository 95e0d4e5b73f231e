"""A registered router that reaches no replica: changes of replicas wait for it, but not without end."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import pytest

from headrace_cluster.controller.health import watch_health
from headrace_cluster.controller.members import Membership
from headrace_cluster.controller.supervisor import Supervisor
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.router_reach import START_SECONDS, WAIT_SECONDS, RouterReach
from headrace_cluster.core.router_reports import RouterReports
from headrace_cluster.errors import DrainError
from headrace_cluster.spec.cluster_spec import parse_spec
from headrace_proto import control_pb2 as pb
from support.cluster.fake_driver import FakeDriver
from support.members import MEMBER

Eventually = Callable[..., Awaitable[Any]]
NAMES = [ReplicaName("smollm2-0", 1), ReplicaName("smollm2-1", 1)]


def _heard(*, heard: bool) -> dict[ReplicaName, bool]:
    return dict.fromkeys(NAMES, heard)


def test_seconds_count_from_the_first_message_that_only_others_receive() -> None:
    reports = RouterReports()
    reach = RouterReach(reports)
    seconds: list[dict[str, float]] = []
    for now, first, second in ((0.0, False, False), (1.0, True, False), (3.0, True, True), (4.0, True, False)):
        reports.report("first", _heard(heard=first), now)
        reports.report("second", _heard(heard=second), now)
        reach.look({"first", "second"}, now)
        seconds.append(reach.unreached(now + 1.0))
    assert seconds == [{}, {"second": 1.0}, {}, {"second": 1.0}]
    reach.look({"first"}, 5.0)
    assert reach.unreached(5.0) == {}, "its stream has ended"


def test_a_router_that_does_not_report_is_not_reached() -> None:
    """It has stopped, or it is of a contract version that replicas refuse."""
    reports = RouterReports()
    reach = RouterReach(reports)
    for second in range(60):
        reports.report("first", _heard(heard=True), float(second))
        reach.look({"first", "silent"}, float(second))
    assert reach.unreached(59.0) == {"silent": 59.0}


def test_changes_do_not_wait_without_end(driver: FakeDriver, eventually: Eventually) -> None:
    later = 0.0  # seconds that have passed for the member list

    async def scenario() -> None:
        nonlocal later
        membership = Membership(lambda: asyncio.get_running_loop().time() + later)
        spec = parse_spec({"models": [{"replicas": 2}], "health": {"interval_seconds": 0.05, "drain_seconds": 2}})
        supervisor = Supervisor(spec, driver, membership, partial(watch_health, MEMBER))
        supervisor.start()
        await eventually(lambda: supervisor.reconciler.ready)
        for router_id in ("one", "cut-off"):
            membership.routers[router_id] = pb.RouterInfo(id=router_id, http=f"{router_id}:8000")
        for name in NAMES:
            driver.replicas[name].routers = 1

        async def report(*, one: bool) -> None:
            for router_id, heard in (("one", one), ("cut-off", False)):
                replicas = [pb.HeardReplica(replica_id=n.replica_id, generation=1, heard=heard) for n in NAMES]
                membership.report(pb.RouterReport(router_id=router_id, replicas=replicas))
            await asyncio.sleep(0.2)  # for health messages of all replicas

        def notes() -> list[str]:
            return [entry["note"] for entry in supervisor.status()["routers"]]

        def connected() -> set[bool]:
            return {entry["connected"] for entry in supervisor.status()["replicas"]}

        await report(one=False)
        later += 2 * WAIT_SECONDS
        await report(one=False)
        assert (connected(), notes()) == ({False}, ["", ""]), "the controller cannot judge which one is cut off"
        await report(one=True)
        assert (connected(), notes()) == ({False}, ["", ""]), "it may have just started"
        later += START_SECONDS
        await report(one=True)
        note = "router cut-off (cut-off:8000) reports no replica"
        assert connected() == {False} and note in notes()[1] and not notes()[0]
        for change in (supervisor.drains.roll, supervisor.drains.begin):
            with pytest.raises(DrainError, match="not every router is connected to smollm2-1") as raised:
                change("smollm2-0")
            assert note in str(raised.value)
        later += WAIT_SECONDS
        await report(one=True)
        assert connected() == {True} and supervisor.status()["problems"] == [notes()[1]]
        assert supervisor.drains.roll("smollm2-0")["beside"] is False
        await supervisor.stop()

    asyncio.run(scenario())

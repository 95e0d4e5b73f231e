"""Generated messages of peers with a certificate, to the controller: a status with a sentence, others unaffected."""

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from headrace_cluster.controller.build import Build
from headrace_cluster.controller.control_service import FIELD_CHARS, start_control_server
from headrace_cluster.controller.health import watch_health
from headrace_cluster.controller.members import Membership
from headrace_cluster.controller.supervisor import Supervisor
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.spec.cluster_spec import parse_spec
from headrace_proto import control_pb2 as pb
from headrace_proto import replica_pb2
from headrace_proto.caller_streams import STREAMS_PER_CALLER
from headrace_proto.channel_options import NO_PROXY, OWN_CONNECTION
from headrace_proto.component import Component
from headrace_proto.identity import Identity
from support import identities
from support.cluster.fake_driver import FakeDriver
from support.hostile_messages import altered, damaged, is_ours, messages
from support.loop_probe import LoopProbe

EXAMPLES = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
MANY = settings(EXAMPLES, max_examples=3000)
ANSWER_SECONDS = 0.02  # for what follows the first answer while a stream stays open
LAG_SECONDS = 0.5 if "slipcover" in sys.modules else 0.06  # measured coverage takes up to 0.2 s of it
MESSAGE_BYTES = 256 << 10  # that the controller receives
HOSTILE, NEIGHBOUR = "r-1", "r-2"
SEEN = ReplicaName("m-0", 1)
ALLOWED = {
    grpc.StatusCode.OK,
    grpc.StatusCode.CANCELLED,  # by the client, after ANSWER_SECONDS
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
}
VALID: dict[str, Any] = {
    "Watch": pb.WatchRequest(router=pb.RouterInfo(id=HOSTILE, pid=1, node="n", http="127.0.0.1:1")),
    "Report": pb.RouterReport(router_id=HOSTILE, replicas=[pb.HeardReplica(replica_id="m-0", generation=1)]),
    "Renew": pb.RenewRequest(certificate_request=identities.router().request),
}
GIVEN: dict[str, SearchStrategy[Any]] = {
    "headrace.v1.RouterInfo.id": st.sampled_from([HOSTILE, NEIGHBOUR]),
    "headrace.v1.RouterReport.router_id": st.sampled_from([HOSTILE, NEIGHBOUR]),
    "headrace.v1.HeardReplica.replica_id": st.just("m-0"),
    "headrace.v1.NotFinite.replica_id": st.just("m-0"),
    "headrace.v1.NotFinite.source_id": st.sampled_from(["", "m-0", "m-1"]),
}


class _Controller:
    """A control server with one more router, which watches and reports."""

    def __init__(self, identity: Identity) -> None:
        self.membership = Membership()
        self.loop = asyncio.new_event_loop()  # never closed: gRPC may still call it
        self.failures: list[Any] = []
        self.loop.set_exception_handler(lambda _, context: self.failures.append(context))
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()
        self._channels: dict[str, grpc.aio.Channel] = {}
        self.run(self._start(identity))

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    async def _start(self, identity: Identity) -> None:
        self._server, port = await start_control_server(self.membership, identity, identities.authority, "127.0.0.1", 0)
        self._address = f"127.0.0.1:{port}"
        await self.membership.publish([], [])
        info = pb.RouterInfo(id=NEIGHBOUR)
        self._watch: Any = self.channel(Component.ROUTER, NEIGHBOUR).unary_stream("/headrace.v1.Control/Watch")(
            pb.WatchRequest(router=info).SerializeToString()
        )
        await self._watch.read()

    def channel(self, component: Component, name: str = HOSTILE) -> Any:
        key = f"{component} {name}"
        if key not in self._channels:
            member = identities.member(component, name=name)
            self._channels[key] = member.channel(self._address, Component.CONTROLLER, (*NO_PROXY, *OWN_CONNECTION))
        return self._channels[key]

    async def report(self) -> None:
        """The other router's report: it hears the replica."""
        replica = pb.HeardReplica(replica_id="m-0", generation=1, heard=True)
        message = pb.RouterReport(router_id=NEIGHBOUR, replicas=[replica])
        channel = self.channel(Component.ROUTER, NEIGHBOUR)
        await channel.unary_unary("/headrace.v1.Control/Report")(message.SerializeToString())

    async def call(self, component: Component, method: str, sent: bytes) -> tuple[grpc.StatusCode, str]:
        """The status of a call with these bytes."""
        channel, path = self.channel(component), f"/headrace.v1.Control/{method}"
        call: Any = channel.unary_stream(path)(sent) if method == "Watch" else channel.unary_unary(path)(sent)
        try:
            if method == "Watch":
                answer = await call.read()
                async with asyncio.timeout(ANSWER_SECONDS):
                    while answer is not grpc.aio.EOF:
                        answer = await call.read()
            else:
                await call
        except (TimeoutError, grpc.aio.AioRpcError):
            call.cancel()
        return await call.code(), await call.details() or ""

    async def stop(self) -> None:
        for channel in self._channels.values():
            await channel.close()
        await self._server.stop(0)

    def close(self) -> None:
        self.run(self.stop())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(5)


@pytest.fixture
def controller(identity: Identity, caplog: pytest.LogCaptureFixture) -> Iterator[_Controller]:
    made = _Controller(identity)
    probe = LoopProbe(made.loop)
    yield made
    longest = probe.stop()
    assert longest < LAG_SECONDS
    made.run(made.report())
    assert NEIGHBOUR in {router.id for router in made.membership.routers.values()}
    assert made.membership.router_reports.receives(SEEN, time.monotonic()) is True
    assert made.failures == []
    assert [record for record in caplog.records if is_ours(record)] == []
    made.close()


def _run(controller: _Controller, method: str, limits: settings) -> None:
    valid = VALID[method]
    sent = (
        altered(valid, GIVEN).map(lambda message: message.SerializeToString())
        | messages(valid.DESCRIPTOR, GIVEN).map(lambda message: message.SerializeToString())
        | damaged(valid.SerializeToString())
    )

    @limits
    @given(component=st.sampled_from([Component.ROUTER] * 3 + list(Component)), data=sent)
    def check(component: Component, data: bytes) -> None:
        code, details = controller.run(controller.call(component, method, data))
        allowed = ALLOWED if component is Component.ROUTER else {grpc.StatusCode.PERMISSION_DENIED}
        if len(data) > MESSAGE_BYTES:
            allowed = allowed | {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert code in allowed, (code, details)
        assert code is grpc.StatusCode.OK or details
        assert {router.id for router in controller.membership.routers.values()} <= {HOSTILE, NEIGHBOUR}

    check()


@pytest.mark.parametrize("method", VALID)
def test_a_controller_with_hostile_routers(controller: _Controller, method: str) -> None:
    _run(controller, method, EXAMPLES)


@pytest.mark.slow
@pytest.mark.parametrize("method", VALID)
def test_a_controller_with_many_hostile_routers(controller: _Controller, method: str) -> None:
    _run(controller, method, MANY)


def test_reports_of_routers_are_bounded(controller: _Controller) -> None:
    """The longest ones that a message can hold cost little, as the fixture measures, and none is kept."""
    for report in (
        pb.RouterReport(router_id=HOSTILE, not_finite=[pb.NotFinite()] * 130_000),
        pb.RouterReport(router_id=HOSTILE, replicas=[pb.HeardReplica()] * 130_000),
    ):
        controller.run(controller.call(Component.ROUTER, "Report", report.SerializeToString()))
    assert controller.membership.router_reports.not_finite(time.monotonic()) == {}


def test_a_router_counts_once_and_registers_little(controller: _Controller) -> None:
    """Each stream was a router more that a new build had to wait for."""

    async def watch_twice() -> int:
        channel, sent = controller.channel(Component.ROUTER), VALID["Watch"].SerializeToString()
        calls: list[Any] = [channel.unary_stream("/headrace.v1.Control/Watch")(sent) for _ in range(3)]
        for call in calls:
            await call.read()
        count = len(controller.membership.routers)
        for call in calls:
            call.cancel()
        return count

    assert controller.run(watch_twice()) == 2
    long = pb.WatchRequest(router=pb.RouterInfo(id=HOSTILE, http="x" * (FIELD_CHARS + 1))).SerializeToString()
    code, _ = controller.run(controller.call(Component.ROUTER, "Watch", long))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    for name in ("http", "grpc", "metrics"):
        info = pb.RouterInfo(id=HOSTILE)
        setattr(info, name, "\x1b]0;title\x07127.0.0.1:1")
        sent = pb.WatchRequest(router=info).SerializeToString()
        code, details = controller.run(controller.call(Component.ROUTER, "Watch", sent))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and "HOST:PORT" in details
    many = pb.RouterReport(router_id=HOSTILE, replicas=[pb.HeardReplica(replica_id="x" * 40)] * 100_000)
    code, _ = controller.run(controller.call(Component.ROUTER, "Report", many.SerializeToString()))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED


def test_status_names_a_router_whose_streams_are_refused(controller: _Controller) -> None:
    """Another process with its credentials may hold the eight: the router cannot connect again."""

    async def watch_often() -> grpc.StatusCode:
        channel, sent = controller.channel(Component.ROUTER), VALID["Watch"].SerializeToString()
        calls: list[Any] = [channel.unary_stream("/headrace.v1.Control/Watch")(sent) for _ in range(STREAMS_PER_CALLER)]
        for call in calls:
            await call.read()
        code: grpc.StatusCode = await channel.unary_stream("/headrace.v1.Control/Watch")(sent).code()
        for call in calls:
            call.cancel()
        return code

    assert controller.run(watch_often()) is grpc.StatusCode.RESOURCE_EXHAUSTED
    spec = parse_spec({"models": [{"replicas": 1}]})
    supervisor = Supervisor(spec, FakeDriver(), controller.membership, partial(watch_health, identities.controller()))
    health = replica_pb2.ReplicaHealth(refused_callers=["r-9", "\x1b]0;title\x07" + 1000 * "x"] + 100 * ["r-10"])
    supervisor._builds[SEEN] = Build(health=health)
    problems = supervisor.status()["problems"]
    assert len(problems) == 4 and all("refuses streams of" in problem for problem in problems)
    assert "the controller refuses streams of r-1," in problems[0] and "m-0 refuses streams of r-9," in problems[1]
    assert all(problem.isprintable() and len(problem) < 500 for problem in problems)

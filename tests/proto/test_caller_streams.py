"""The streams that one caller has open on an internal server are few."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import structlog.testing

from headrace_proto import replica_pb2, replica_pb2_grpc
from headrace_proto.caller_streams import SHOWN_CALLERS, SHOWN_SECONDS, STREAMS_PER_CALLER, CallerStreams
from headrace_proto.callers import CallerInterceptor
from headrace_proto.channel_options import NO_PROXY, OWN_CONNECTION, SERVER
from headrace_proto.component import Component
from support.identities import member

LARGE = replica_pb2.DescribeChunk(tokenizer_json=b"t" * (1 << 20))


class _Replica(replica_pb2_grpc.ReplicaServicer):
    """Counts the streams that are open."""

    def __init__(self) -> None:
        self.open = 0

    async def WatchHealth(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for each in self._stream(replica_pb2.ReplicaHealth(), 1):
            yield each

    async def Describe(self, request: Any, context: Any) -> AsyncIterator[Any]:
        async for each in self._stream(LARGE, 1000):
            yield each

    async def _stream(self, message: Any, count: int) -> AsyncIterator[Any]:
        self.open += 1
        try:
            for _ in range(count):
                yield message
            await asyncio.Event().wait()
        finally:
            self.open -= 1


Connect = Callable[[Component, str], Any]


def _run(check: Callable[[_Replica, Connect], Awaitable[None]]) -> None:
    async def run() -> None:
        servicer = _Replica()
        server = grpc.aio.server(interceptors=[CallerInterceptor()], options=SERVER)
        replica_pb2_grpc.add_ReplicaServicer_to_server(servicer, server)
        port = server.add_secure_port("127.0.0.1:0", member(Component.REPLICA).server_credentials())
        await server.start()
        channels: list[grpc.aio.Channel] = []

        def connect(component: Component, name: str) -> Any:
            options = (*NO_PROXY, *OWN_CONNECTION)
            channels.append(member(component, name=name).channel(f"127.0.0.1:{port}", Component.REPLICA, options))
            return replica_pb2_grpc.ReplicaStub(channels[-1])

        try:
            async with asyncio.timeout(20):
                await check(servicer, connect)
        finally:
            for channel in channels:
                await channel.close()
            await server.stop(0)

    asyncio.run(run())


def test_further_streams_of_a_caller_are_refused() -> None:
    async def check(servicer: _Replica, connect: Connect) -> None:
        """Over connections of its own for each stream: a connection that is lost is one more for a while."""
        request = replica_pb2.HealthRequest()
        calls = [connect(Component.CONTROLLER, "c-1").WatchHealth(request) for _ in range(STREAMS_PER_CALLER)]
        for call in calls:
            assert await call.read() is not grpc.aio.EOF
        refused = connect(Component.CONTROLLER, "c-1").WatchHealth(request)
        assert await refused.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        neighbour = connect(Component.CONTROLLER, "c-2").WatchHealth(request)
        assert await neighbour.read() is not grpc.aio.EOF
        assert servicer.open == STREAMS_PER_CALLER + 1 and not any(call.done() for call in calls)
        calls[0].cancel()
        async with asyncio.timeout(5):
            while servicer.open > STREAMS_PER_CALLER:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        again = connect(Component.CONTROLLER, "c-1").WatchHealth(request)
        assert await again.read() is not grpc.aio.EOF

    _run(check)


def test_streams_that_are_not_read_are_as_few() -> None:
    """Each holds a message of a megabyte until its connection ends."""

    async def check(servicer: _Replica, connect: Connect) -> None:
        stubs = [connect(Component.ROUTER, "r-1") for _ in range(3)]
        calls = [stubs[number % 3].Describe(replica_pb2.DescribeRequest()) for number in range(3 * STREAMS_PER_CALLER)]
        codes = []
        for call in calls[STREAMS_PER_CALLER:]:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(2):
                    codes.append(await call.code())
        assert servicer.open == STREAMS_PER_CALLER
        assert codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED) >= STREAMS_PER_CALLER

    _run(check)


def _refuse(streams: CallerStreams, caller: str) -> None:
    with contextlib.ExitStack() as held:
        for _ in range(STREAMS_PER_CALLER):
            assert held.enter_context(streams.count("Watch", caller))
        assert not held.enter_context(streams.count("Watch", caller))


def test_refusals_are_shown_for_a_minute_and_logged_once_in_it() -> None:
    now = 0.0
    streams = CallerStreams(lambda: now)
    with structlog.testing.capture_logs() as logged:
        for _ in range(3):
            _refuse(streams, "r-1")
        assert streams.refused == ["r-1"] and [entry["caller"] for entry in logged] == ["r-1"]
        now = SHOWN_SECONDS - 1
        _refuse(streams, "r-1")
        now += 2
        _refuse(streams, "r-2")
        assert streams.refused == ["r-1", "r-2"]
        _refuse(streams, "r-1")
        assert [entry["caller"] for entry in logged] == ["r-1", "r-2", "r-1"]
    now += SHOWN_SECONDS
    assert streams.refused == []


def test_few_callers_are_shown() -> None:
    now = 0.0
    streams = CallerStreams(lambda: now)
    for number in range(2 * SHOWN_CALLERS):
        now = number
        _refuse(streams, f"r-{number:02}")
    assert streams.refused == [f"r-{number:02}" for number in range(SHOWN_CALLERS, 2 * SHOWN_CALLERS)]

"""The streams that one caller has open on an internal server are few: the newest replaces the oldest (R18)."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import pytest

from headrace_proto import replica_pb2, replica_pb2_grpc
from headrace_proto.caller_streams import STREAMS_PER_CALLER
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


def test_the_newest_stream_of_a_caller_replaces_its_oldest() -> None:
    async def check(servicer: _Replica, connect: Connect) -> None:
        """Over connections of its own for each stream: a connection that is lost is one more for a while."""
        request = replica_pb2.HealthRequest()
        neighbour = connect(Component.CONTROLLER, "c-2").WatchHealth(request)
        await neighbour.read()
        calls: list[Any] = []
        for _ in range(STREAMS_PER_CALLER + 2):
            calls.append(connect(Component.CONTROLLER, "c-1").WatchHealth(request))
            assert await calls[-1].read() is not grpc.aio.EOF, "a new stream is served at once"
        for replaced in calls[:2]:
            assert await replaced.code() is grpc.StatusCode.ABORTED
            assert "newer" in await replaced.details()
        assert servicer.open == STREAMS_PER_CALLER + 1
        assert not neighbour.done() and not any(call.done() for call in calls[2:])

    _run(check)


def test_a_stream_that_is_not_read_is_replaced_too() -> None:
    async def check(servicer: _Replica, connect: Connect) -> None:
        stub = connect(Component.ROUTER, "r-1")
        calls = []
        for _ in range(STREAMS_PER_CALLER + 2):
            calls.append(stub.Describe(replica_pb2.DescribeRequest()))
            await calls[-1].read()
        while servicer.open != STREAMS_PER_CALLER:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await calls[0].read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() is grpc.StatusCode.ABORTED, "one that reads again connects again"

    _run(check)

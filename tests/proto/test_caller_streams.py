"""The streams that one caller has open on an internal server are few (docs/reliability.md R18)."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

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

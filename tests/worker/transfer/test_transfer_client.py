"""A target's streams to its sources, with a real server that answers hello."""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from headrace_proto import replica_pb2 as pb
from headrace_proto.replica_pb2_grpc import ReplicaServicer, add_ReplicaServicer_to_server
from headrace_worker.core.transfer.messages import Cancel, FetchRequest, ToSource
from headrace_worker.core.transfer.shards import GroupShard, KvGroup, KvShards, RankShard
from headrace_worker.server.transfer_client import TransferClient
from headrace_worker.server.transfer_peer import TransferPeer, to_source
from support.members import MEMBER

SHARDS = KvShards(4, "float32", (KvGroup(0, (8,)),), (RankShard((GroupShard((0,), (0, 1)),)),))


class Replica:
    """One end, whose step loop records the calls."""

    def __init__(self, name: str, shards: KvShards | None = SHARDS) -> None:
        self.events: list[str] = []
        fetcher = SimpleNamespace(
            connect=lambda source, order: self.events.append("connected"),
            peer_lost=lambda source: self.events.append("lost"),
        )
        commands: Any = SimpleNamespace(exchange=lambda action: action(SimpleNamespace(fetcher=fetcher)))
        identity = pb.ReplicaIdentity(replica_id=name, boot_id=name.encode())
        self.peer = TransferPeer(lambda: identity, shards, commands)


class Source(ReplicaServicer):
    """Records the received messages."""

    def __init__(self, shards: KvShards | None = SHARDS) -> None:
        self.received: list[str] = []
        self.replica = Replica("source", shards)

    async def Transfer(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.TransferFrame]:
        async for frame in request_iterator:
            self.received.append("hello" if frame.HasField("hello") else type(to_source(frame)).__name__)
            if frame.HasField("hello"):
                yield self.replica.peer.hello()


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("the condition was not met within 5 s")


async def conversation(first: ToSource, shards: KvShards | None = SHARDS) -> tuple[list[str], list[str]]:
    """Events of the step loop and messages of the source: for a first message, and a second one after a lost stream."""
    source, target = Source(shards), Replica("target")
    server = grpc.aio.server()
    add_ReplicaServicer_to_server(source, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    client = TransferClient(target.peer, MEMBER)
    try:
        client.send(address, first)
        await until(lambda: "lost" in target.events or "FetchRequest" in source.received)
        if shards is not None:
            client.send(address, Cancel(2))
            await until(lambda: "Cancel" in source.received)
    finally:
        await client.close()
        await server.stop(0)
    return target.events, source.received


def test_messages_arrive_on_one_stream() -> None:
    events, received = asyncio.run(conversation(FetchRequest(1, b"", "", [1, 2, 3, 4], 0, timeout=2.0)))
    assert events == ["connected"] and received == ["hello", "FetchRequest", "Cancel"]


def test_a_source_without_nixl_is_not_used() -> None:
    events, received = asyncio.run(conversation(Cancel(1), shards=None))
    assert events == ["lost"] and received == ["hello"]


def test_a_source_that_cannot_be_reached_is_forgotten_with_its_messages() -> None:
    async def run() -> None:
        target = Replica("target")
        client = TransferClient(target.peer, MEMBER)
        for _ in range(3):
            client.send("127.0.0.1:9", Cancel(1))
        assert len(client._streams) == 1
        await until(lambda: target.events == ["lost"])
        assert not client._streams
        client.send("127.0.0.1:9", Cancel(1))
        client.disconnect("127.0.0.1:9")
        assert not client._streams

    asyncio.run(run())

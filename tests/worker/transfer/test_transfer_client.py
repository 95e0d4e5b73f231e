"""A target's streams to its sources, with a real server that answers hello."""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from headrace_proto import replica_pb2 as pb
from headrace_proto.replica_pb2_grpc import ReplicaServicer, add_ReplicaServicer_to_server
from headrace_worker.core.config import Rendezvous
from headrace_worker.core.transfer.messages import Cancel, FetchRequest, ToSource
from headrace_worker.core.transfer.shards import KvShards, RankShard
from headrace_worker.server.transfer_client import TransferClient
from headrace_worker.server.transfer_convert import shards_message
from support.members import MEMBER

SHARDS = shards_message(KvShards(4, 8, "float32", (0,), (RankShard(((0,),), (0, 1)),)))


class Source(ReplicaServicer):
    """Records the received messages."""

    def __init__(self) -> None:
        self.received: list[str | None] = []

    async def Transfer(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.SourceFrame]:
        async for frame in request_iterator:
            self.received.append(frame.WhichOneof("message"))
            if frame.HasField("hello"):
                yield pb.SourceFrame(hello=pb.SourceHello(shards=SHARDS))


class FakePairRegistry:
    """A replica whose step loop records the calls."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.identity = pb.ReplicaIdentity(replica_id="target")
        self.shards_message = SHARDS
        exchange = SimpleNamespace(
            open_source=lambda source, order: self.events.append("opened"),
            source_lost=lambda source: self.events.append("lost"),
            open_target=lambda target, order: self.events.append("target opened"),
            target_lost=lambda target: self.events.append("target lost"),
        )
        self.commands = SimpleNamespace(exchange=lambda action: action(exchange))

    def open_rendezvous(self) -> Any:
        return SimpleNamespace(rendezvous=Rendezvous("127.0.0.1", 1, bytes(32)))

    def find_mismatch(self, identity: pb.ReplicaIdentity, shards: KvShards) -> str:
        return ""

    def as_target(self, opened: Any, shards: KvShards) -> None:
        return None

    def as_source(self, rendezvous: Rendezvous, shards: KvShards) -> None:
        return None


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("the condition was not met within 5 s")


async def conversation(first: ToSource) -> tuple[list[str], list[str | None]]:
    """Events of the step loop and messages of the source: for a first message, and a second one after a lost stream."""
    source, pair_registry = Source(), FakePairRegistry()
    server = grpc.aio.server()
    add_ReplicaServicer_to_server(source, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    client = TransferClient(pair_registry, MEMBER)  # type: ignore[arg-type]
    try:
        client.send(address, first)
        await until(lambda: "lost" in pair_registry.events or "request" in source.received)
        client.send(address, Cancel(2))
        await until(lambda: "cancel" in source.received)
    finally:
        await client.close()
        await server.stop(0)
    return pair_registry.events, source.received


def test_messages_arrive_on_one_stream() -> None:
    events, received = asyncio.run(conversation(FetchRequest(1, b"", "", [1, 2, 3, 4], 0, timeout=2.0)))
    assert events == ["opened"] and received == ["hello", "request", "cancel"]


def test_a_source_that_cannot_be_reached_is_forgotten_with_its_messages() -> None:
    async def run() -> None:
        pair_registry = FakePairRegistry()
        client = TransferClient(pair_registry, MEMBER)  # type: ignore[arg-type]
        for _ in range(3):
            client.send("127.0.0.1:9", Cancel(1))
        assert len(client._streams) == 1
        await until(lambda: pair_registry.events == ["lost"])
        assert not client._streams
        client.send("127.0.0.1:9", Cancel(1))
        client.disconnect("127.0.0.1:9")
        assert not client._streams

    asyncio.run(run())

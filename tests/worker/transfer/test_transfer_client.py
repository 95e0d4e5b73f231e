"""A target's streams to its sources, over a real server that says hello and listens."""

import asyncio
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from headrace_proto import replica_pb2 as pb
from headrace_proto.replica_pb2_grpc import ReplicaServicer, add_ReplicaServicer_to_server
from headrace_worker.config import Meeting
from headrace_worker.server.transfer_client import TransferClient
from headrace_worker.server.transfer_convert import shards_message
from headrace_worker.transfer.messages import Ask, Cancel, ToSource
from headrace_worker.transfer.shards import KvShards, RankShard

SHARDS = shards_message(KvShards(4, 8, "float32", (0,), (RankShard(((0,),), (0, 1)),)))
UNSAYABLE = Ask(1, b"", "", [1, 2, 3, 4], 0, patience=1e12)  # more milliseconds than the frame can carry


class Source(ReplicaServicer):
    """Notes what it hears."""

    def __init__(self) -> None:
        self.heard: list[str | None] = []

    async def Transfer(self, request_iterator: Any, context: Any) -> AsyncIterator[pb.SourceFrame]:
        async for frame in request_iterator:
            self.heard.append(frame.WhichOneof("message"))
            if frame.HasField("hello"):
                yield pb.SourceFrame(hello=pb.SourceHello(shards=SHARDS))


class Desk:
    """A replica whose step loop notes what it is told."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.identity = pb.ReplicaIdentity(replica_id="target")
        self.shards_message = SHARDS
        fetcher = SimpleNamespace(opened=lambda source, order: self.told.append("opened"))
        exchange = SimpleNamespace(fetcher=fetcher, source_lost=lambda source: self.told.append("lost"))
        self.loop = SimpleNamespace(exchange=lambda tell: tell(exchange))

    def open_meeting(self) -> Any:
        return SimpleNamespace(meeting=Meeting("127.0.0.1", 1, 1, bytes(32)))

    def unlike(self, identity: pb.ReplicaIdentity, shards: KvShards) -> str:
        return ""

    def as_target(self, opened: Any, shards: KvShards) -> None:
        return None


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    pytest.fail("it did not come true within 5 s")


async def conversation(first: ToSource) -> tuple[list[str], list[str | None]]:
    """What the step loop is told and the source hears: of a first word, and of a second one when the stream is lost."""
    source, desk = Source(), Desk()
    server = grpc.aio.server()
    add_ReplicaServicer_to_server(source, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    client = TransferClient(desk, b"secret")  # type: ignore[arg-type]
    try:
        client.say(address, first)
        await until(lambda: "lost" in desk.told or "ask" in source.heard)
        client.say(address, Cancel(2))
        await until(lambda: "cancel" in source.heard)
    finally:
        await client.close()
        await server.stop(0)
    return desk.told, source.heard


def test_words_arrive_on_one_stream() -> None:
    told, heard = asyncio.run(conversation(Ask(1, b"", "", [1, 2, 3, 4], 0, patience=2.0)))
    assert told == ["opened"] and heard == ["hello", "ask", "cancel"]


def test_a_word_that_cannot_be_said_ends_the_stream(capfd: pytest.CaptureFixture[str]) -> None:
    """The step loop must hear of it: whoever waits for an answer to what was never sent waits for nothing, and what
    the source holds for those before is given up with the stream, not with its lease.
    """
    told, heard = asyncio.run(conversation(UNSAYABLE))
    assert told == ["opened", "lost", "opened"] and heard == ["hello", "hello", "cancel"]
    assert "kv_source_failed" in "".join(capfd.readouterr())

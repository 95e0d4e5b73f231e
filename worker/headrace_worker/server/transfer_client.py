"""As the target: one stream to each source, opened at the first word for it, and gone when it breaks."""

import asyncio
from typing import Any

import grpc
import structlog

from headrace_proto import CONTRACT_VERSION
from headrace_proto import replica_pb2 as pb
from headrace_proto.duplex import both_ways
from headrace_proto.replica_pb2_grpc import ReplicaStub
from headrace_proto.secret import secret_metadata
from headrace_worker.parallel.errors import MeetingError
from headrace_worker.parallel.meeting import MeetingHost
from headrace_worker.server.pairs import PairDesk
from headrace_worker.server.transfer_convert import (
    InvalidTransferError,
    meeting_message,
    target_frame,
    to_shards,
    to_target_message,
)
from headrace_worker.transfer.messages import FromSource, ToSource

log = structlog.get_logger(__name__)

HELLO_SECONDS = 3.0
_OPTIONS = [
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]


class TransferClient:
    """Of the server's event loop."""

    def __init__(self, desk: PairDesk, secret: bytes) -> None:
        self._desk = desk
        self._metadata = secret_metadata(secret)
        self._outgoing: dict[str, asyncio.Queue[ToSource]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def say(self, source: str, message: ToSource) -> None:
        """To a source, by its address; the first word opens the stream."""
        if source not in self._tasks:
            self._outgoing[source] = asyncio.Queue()
            self._tasks[source] = asyncio.create_task(self._run(source))
        self._outgoing[source].put_nowait(message)

    def hang_up(self, source: str) -> None:
        """Ends the stream to a source, if there is one."""
        task = self._tasks.pop(source, None)
        if task is not None:
            task.cancel()

    async def close(self) -> None:
        """Ends all streams."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, source: str) -> None:
        opened: MeetingHost | None = None
        try:
            opened = await asyncio.to_thread(self._desk.open_meeting)
            async with grpc.aio.insecure_channel(source, options=_OPTIONS) as channel:
                stub: Any = ReplicaStub(channel)
                await self._talk(source, stub.Transfer(metadata=self._metadata), opened)
            reason = "it ended the stream"
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details() or ''}"[:200]
        except (InvalidTransferError, MeetingError, TimeoutError, ConnectionError) as error:
            reason = str(error) or type(error).__name__
        except Exception:
            # A bug of ours must not leave fetches that nobody hears of.
            log.exception("kv_source_failed", source=source)
            reason = "internal error"
        finally:
            if self._tasks.get(source) is asyncio.current_task():
                del self._tasks[source]
        log.warning("kv_source_lost", source=source, reason=reason)
        self._desk.loop.exchange(lambda exchange: exchange.source_lost(source))

    async def _talk(self, source: str, call: Any, opened: MeetingHost) -> None:
        desk = self._desk
        hello = pb.TargetHello(
            contract_version=CONTRACT_VERSION,
            identity=desk.identity,
            shards=desk.shards_message,
            meeting=meeting_message(opened.meeting),
        )
        async with asyncio.timeout(HELLO_SECONDS):
            await call.write(pb.TargetFrame(hello=hello))
            first: pb.SourceFrame | Any = await call.read()
        if first is grpc.aio.EOF or not first.HasField("hello"):
            raise InvalidTransferError("it does not say hello")
        shards = to_shards(first.hello.shards)
        unlike = desk.unlike(first.hello.identity, shards)
        if unlike:
            raise InvalidTransferError(unlike)
        order = desk.as_target(opened, shards)
        desk.loop.exchange(lambda exchange: exchange.fetcher.opened(source, order))
        try:
            await both_ways(self._read(source, call), self._write(self._outgoing[source], call))
        finally:
            call.cancel()

    async def _read(self, source: str, call: Any) -> None:
        while (frame := await call.read()) is not grpc.aio.EOF:
            self._hear(source, to_target_message(frame))

    def _hear(self, source: str, message: FromSource) -> None:
        self._desk.loop.exchange(lambda exchange: exchange.heard_source(source, message))

    async def _write(self, queue: "asyncio.Queue[ToSource]", call: Any) -> None:
        while True:
            await call.write(target_frame(await queue.get()))

"""As the target: one stream to each source, opened with the first message to it, removed when it breaks."""

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from headrace_base.cluster_member import LARGE_MESSAGES, PATIENT, ClusterMember
from headrace_proto import replica_pb2 as pb
from headrace_proto.duplex import run_duplex
from headrace_proto.replica_pb2_grpc import ReplicaStub
from headrace_worker.core.transfer.messages import FromSource, ToSource
from headrace_worker.server.transfer_peer import InvalidTransferError, TransferPeer, frame, from_source

log = structlog.get_logger(__name__)

HELLO_SECONDS = 3.0
_OPTIONS = (*LARGE_MESSAGES, *PATIENT)  # nothing else shows that an idle source is lost


@dataclass(frozen=True, slots=True)
class _Stream:
    queue: "asyncio.Queue[ToSource]"
    task: asyncio.Task[None]


class TransferClient:
    """The streams to sources. For the server's event loop."""

    def __init__(self, peer: TransferPeer, member: ClusterMember) -> None:
        self._peer = peer
        self._member = member
        self._streams: dict[str, _Stream] = {}  # by address

    def send(self, source: str, message: ToSource) -> None:
        """Sends to a source, by its address; the first message opens the stream."""
        stream = self._streams.get(source)
        if stream is None:
            queue: asyncio.Queue[ToSource] = asyncio.Queue()
            stream = self._streams[source] = _Stream(queue, asyncio.create_task(self._run(source, queue)))
        stream.queue.put_nowait(message)

    def disconnect(self, source: str) -> None:
        """Ends the stream to a source, if there is one."""
        stream = self._streams.pop(source, None)
        if stream is not None:
            stream.task.cancel()

    async def close(self) -> None:
        """Ends all streams."""
        tasks = [stream.task for stream in self._streams.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, source: str, queue: "asyncio.Queue[ToSource]") -> None:
        try:
            async with self._member.channel(source, _OPTIONS) as channel:
                stub: Any = ReplicaStub(channel)
                await self._run_stream(source, stub.Transfer(metadata=self._member.metadata), queue)
            reason = "it ended the stream"
        except grpc.aio.AioRpcError as error:
            reason = f"{error.code().name}: {error.details() or ''}"[:200]
        except (InvalidTransferError, TimeoutError, ConnectionError) as error:
            reason = str(error) or type(error).__name__
        except Exception:
            # A bug must not leave fetches that never end.
            log.exception("kv_source_failed", source=source)
            reason = "internal error"
        finally:
            stream = self._streams.get(source)
            if stream is not None and stream.queue is queue:
                del self._streams[source]  # with the messages that were not sent
        log.warning("kv_source_lost", source=source, reason=reason)
        self._peer.commands.exchange(lambda exchange: exchange.fetcher.peer_lost(source))

    async def _run_stream(self, source: str, call: Any, queue: "asyncio.Queue[ToSource]") -> None:
        async with asyncio.timeout(HELLO_SECONDS):
            await call.write(self._peer.hello())
            first: pb.TransferFrame | Any = await call.read()
        if first is grpc.aio.EOF:
            raise InvalidTransferError("it ended the stream before its hello")
        order = self._peer.connect(first, reads=True)
        self._peer.commands.exchange(lambda exchange: exchange.fetcher.connect(source, order))
        try:
            await run_duplex(self._read(source, call), self._write(queue, call))
        finally:
            call.cancel()

    async def _read(self, source: str, call: Any) -> None:
        while (received := await call.read()) is not grpc.aio.EOF:
            self._receive(source, from_source(received))

    def _receive(self, source: str, message: FromSource) -> None:
        self._peer.commands.exchange(lambda exchange: exchange.fetcher.receive(source, message))

    async def _write(self, queue: "asyncio.Queue[ToSource]", call: Any) -> None:
        while True:
            await call.write(frame(await queue.get()))

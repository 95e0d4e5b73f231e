"""As the source: one stream from each target."""

import asyncio
import itertools
from collections.abc import AsyncIterator

import grpc
import structlog

from headrace_proto import CONTRACT_VERSION
from headrace_proto import replica_pb2 as pb
from headrace_worker.server.pairs import PairDesk
from headrace_worker.server.transfer_convert import (
    InvalidTransferError,
    source_frame,
    to_meeting,
    to_shards,
    to_source_message,
)
from headrace_worker.transfer.messages import FromSource, ToSource

log = structlog.get_logger(__name__)


class TransferService:
    """Of the server's event loop. A target is named by its stream, so that one that comes again is another."""

    def __init__(self, desk: PairDesk, *, max_model_len: int, vocab_size: int) -> None:
        self._desk = desk
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._numbers = itertools.count(1)
        self._outgoing: dict[str, asyncio.Queue[FromSource | None]] = {}

    def say(self, target: str, message: FromSource) -> None:
        """To a target; one that is gone hears nothing."""
        queue = self._outgoing.get(target)
        if queue is not None:
            queue.put_nowait(message)

    def hang_up(self, target: str) -> None:
        """Ends a target's stream, if it is there."""
        queue = self._outgoing.get(target)
        if queue is not None:
            queue.put_nowait(None)

    async def serve(
        self, frames: AsyncIterator[pb.TargetFrame], context: "grpc.aio.ServicerContext[object, object]"
    ) -> AsyncIterator[pb.SourceFrame]:
        """One stream, from hello to its end."""
        desk = self._desk
        first = await anext(aiter(frames), None)
        if first is None or not first.HasField("hello") or first.hello.contract_version != CONTRACT_VERSION:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the first frame must say hello")
            return
        try:
            shards, meeting = to_shards(first.hello.shards), to_meeting(first.hello.meeting)
            reason = desk.unlike(first.hello.identity, shards)
        except InvalidTransferError as error:
            reason = str(error)
        if reason:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
            return
        name = f"{first.hello.identity.replica_id}#{next(self._numbers)}"
        queue = self._outgoing[name] = asyncio.Queue()
        order = desk.as_source(meeting, shards)
        desk.loop.exchange(lambda exchange: exchange.target_opened(name, order))
        reader = asyncio.create_task(self._read(name, frames))
        reader.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            yield pb.SourceFrame(hello=pb.SourceHello(identity=desk.identity, shards=desk.shards_message))
            while (message := await queue.get()) is not None:
                yield source_frame(message)
        finally:
            reader.cancel()
            del self._outgoing[name]
            desk.loop.exchange(lambda exchange: exchange.granter.lost(name))

    async def _read(self, name: str, frames: AsyncIterator[pb.TargetFrame]) -> None:
        try:
            async for frame in frames:
                self._hear(
                    name, to_source_message(frame, max_model_len=self._max_model_len, vocab_size=self._vocab_size)
                )
        except InvalidTransferError as error:
            log.warning("kv_target_refused", target=name, reason=str(error))

    def _hear(self, name: str, message: ToSource) -> None:
        self._desk.loop.exchange(lambda exchange: exchange.heard_target(name, message))

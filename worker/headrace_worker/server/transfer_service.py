"""As the source: one stream from each target."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import structlog

from headrace_proto import CONTRACT_VERSION, is_compatible
from headrace_proto import replica_pb2 as pb
from headrace_worker.core.transfer.messages import FromSource, ToSource
from headrace_worker.server.pairs import PairRegistry
from headrace_worker.server.served_call import ServedCall
from headrace_worker.server.transfer_convert import (
    InvalidTransferError,
    source_frame,
    to_rendezvous,
    to_shards,
    to_source_message,
)

MAX_UNSENT = 4096  # messages that wait for a target

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Stream:
    queue: "asyncio.Queue[FromSource | None]"  # None: the target has closed its side
    call: ServedCall


class TransferService:
    """The streams from targets. For the server's event loop. A target that connects again counts as another one."""

    def __init__(self, pair_registry: PairRegistry, *, max_model_len: int, vocab_size: int) -> None:
        self._pair_registry = pair_registry
        self._max_model_len = max_model_len
        self._vocab_size = vocab_size
        self._numbers = itertools.count(1)
        self._streams: dict[str, _Stream] = {}  # by target

    def send(self, target: str, message: FromSource) -> None:
        """Sends to a target; dropped when its stream has ended. One that reads no answers is disconnected."""
        stream = self._streams.get(target)
        if stream is None:
            return
        if stream.queue.qsize() < MAX_UNSENT:
            stream.queue.put_nowait(message)
        else:
            self.disconnect(target)

    def disconnect(self, target: str) -> None:
        """Ends a target's stream, if there is one; what was not sent is dropped."""
        stream = self._streams.pop(target, None)
        if stream is not None:
            stream.call.end("the source has ended this stream: the target reads no answers, or a transfer failed")

    async def serve(
        self, frames: AsyncIterator[pb.TargetFrame], context: "grpc.aio.ServicerContext[object, object]"
    ) -> AsyncIterator[pb.SourceFrame]:
        """One stream, from hello to its end."""
        pair_registry = self._pair_registry
        first = await anext(aiter(frames), None)
        if first is None or not first.HasField("hello") or not is_compatible(first.hello.contract_version):
            await context.abort(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"the first frame must be a hello; contract versions may differ from {CONTRACT_VERSION} by one",
            )
            return
        try:
            shards, rendezvous = to_shards(first.hello.shards), to_rendezvous(first.hello.rendezvous)
            reason = pair_registry.find_mismatch(first.hello.identity, shards)
        except InvalidTransferError as error:
            reason = str(error)
        if reason:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, reason)
            return
        name = f"{first.hello.identity.replica_id}#{next(self._numbers)}"
        queue: asyncio.Queue[FromSource | None] = asyncio.Queue()
        self._streams[name] = _Stream(queue, ServedCall(context))
        order = pair_registry.as_source(rendezvous, shards)
        pair_registry.commands.exchange(lambda exchange: exchange.open_target(name, order))
        reader = asyncio.create_task(self._read(name, frames))
        reader.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            yield pb.SourceFrame(
                hello=pb.SourceHello(identity=pair_registry.identity, shards=pair_registry.shards_message)
            )
            while (message := await queue.get()) is not None:
                yield source_frame(message)
        finally:
            reader.cancel()
            self._streams.pop(name, None)
            pair_registry.commands.exchange(lambda exchange: exchange.target_lost(name))

    async def _read(self, name: str, frames: AsyncIterator[pb.TargetFrame]) -> None:
        try:
            async for frame in frames:
                self._receive(
                    name, to_source_message(frame, max_model_len=self._max_model_len, vocab_size=self._vocab_size)
                )
        except InvalidTransferError as error:
            log.warning("kv_target_refused", target=name, reason=str(error))

    def _receive(self, name: str, message: ToSource) -> None:
        self._pair_registry.commands.exchange(lambda exchange: exchange.receive_from_target(name, message))

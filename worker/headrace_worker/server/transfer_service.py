"""As the source: one stream from each target."""

import asyncio
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass

import grpc
import structlog

from headrace_proto import replica_pb2 as pb
from headrace_worker.core.transfer.messages import FromSource, ToSource
from headrace_worker.server.served_call import ServedCall
from headrace_worker.server.transfer_peer import InvalidTransferError, TransferPeer, frame, to_source

MAX_UNSENT = 4096  # messages that wait for a target

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Stream:
    queue: "asyncio.Queue[FromSource | None]"  # None: the target has closed its side
    call: ServedCall


class TransferService:
    """The streams from targets. For the server's event loop. A target that connects again counts as another one."""

    def __init__(self, peer: TransferPeer) -> None:
        self._peer = peer
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
        self, frames: AsyncIterator[pb.TransferFrame], context: "grpc.aio.ServicerContext[object, object]"
    ) -> AsyncIterator[pb.TransferFrame]:
        """One stream, from hello to its end."""
        first = await anext(aiter(frames), pb.TransferFrame())
        try:
            order = self._peer.connect(first, reads=False)
        except InvalidTransferError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
            return
        name = f"{first.hello.identity.replica_id}#{next(self._numbers)}"
        queue: asyncio.Queue[FromSource | None] = asyncio.Queue()
        self._streams[name] = _Stream(queue, ServedCall(context))
        self._peer.commands.exchange(lambda exchange: exchange.granter.connect(name, order))
        reader = asyncio.create_task(self._read(name, frames))
        reader.add_done_callback(lambda _: queue.put_nowait(None))
        try:
            yield self._peer.hello()
            while (message := await queue.get()) is not None:
                yield frame(message)
        finally:
            reader.cancel()
            self._streams.pop(name, None)
            self._peer.commands.exchange(lambda exchange: exchange.granter.peer_lost(name))

    async def _read(self, name: str, frames: AsyncIterator[pb.TransferFrame]) -> None:
        try:
            async for received in frames:
                self._receive(name, to_source(received))
        except InvalidTransferError as error:
            log.warning("kv_target_refused", target=name, reason=str(error))

    def _receive(self, name: str, message: ToSource) -> None:
        self._peer.commands.exchange(lambda exchange: exchange.granter.receive(name, message))

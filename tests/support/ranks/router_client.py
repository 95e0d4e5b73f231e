"""A client of replicas that sends and receives a router's messages, for tests without a router."""

import asyncio
import concurrent.futures
import os
import threading
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any

import grpc

from headrace_base.cluster_member import NO_PROXY
from headrace_proto import CONTRACT_VERSION
from headrace_proto import replica_pb2 as pb
from headrace_proto.replica_pb2_grpc import ReplicaStub
from headrace_worker.core.plan import SampledLogprobs
from headrace_worker.offline import Completion
from support.members import MEMBER, METADATA


@dataclass
class Sent:
    """A request in flight."""

    attempt_id: bytes
    completion: Completion = field(default_factory=Completion)
    finish: int = pb.FINISH_NONE
    ended: threading.Event = field(default_factory=threading.Event)

    def wait(self, seconds: float = 60) -> Completion:
        """The completion of an answer that ended with stop or length."""
        assert self.ended.wait(seconds), "no end in time"
        assert self.finish in (pb.FINISH_STOP, pb.FINISH_LENGTH), f"{self.finish} {self.completion.error}"
        return self.completion


class ServeStream:
    """A Serve stream to one replica."""

    def __init__(self, address: str, loop: asyncio.AbstractEventLoop) -> None:
        self.load = pb.Load()
        self.broken = False
        self._loop = loop
        self._sent: dict[bytes, Sent] = {}
        self._frames: asyncio.Queue[pb.RouterFrame] = asyncio.Queue()
        self._task = asyncio.run_coroutine_threadsafe(self._run(address), loop)

    def submit(self, prompt: list[int], count: int, source: str = "", **options: Any) -> Sent:
        """Greedy unless set in `options` of sampling; `source`: address of the replica to fetch KV blocks from."""
        sampling: dict[str, Any] = {"temperature": 0, "max_tokens": count, "ignore_eos": True, "logprobs": 2}
        sent = Sent(os.urandom(16))
        self._sent[sent.attempt_id] = sent
        submit = pb.Submit(
            attempt_id=sent.attempt_id, prompt_token_ids=prompt, sampling=pb.Sampling(**sampling | options)
        )
        if source:
            submit.source.address = source
        self._put(pb.RouterFrame(submits=[submit]))
        return sent

    def cancel(self, sent: Sent) -> None:
        self._put(pb.RouterFrame(cancels=[pb.Cancel(attempt_id=sent.attempt_id)]))

    def close(self) -> None:
        self._task.cancel()

    def _put(self, frame: pb.RouterFrame) -> None:
        self._loop.call_soon_threadsafe(self._frames.put_nowait, frame)

    async def _run(self, address: str) -> None:
        try:
            async with MEMBER.channel(address, NO_PROXY) as channel:
                stub: Any = ReplicaStub(channel)
                call = stub.Serve(metadata=METADATA)
                hello = pb.RouterHello(router_id="test", contract_version=CONTRACT_VERSION)
                await call.write(pb.RouterFrame(hello=hello))
                writer = asyncio.create_task(self._write(call))
                try:
                    while (frame := await call.read()) is not grpc.aio.EOF:
                        self._take(frame)
                finally:
                    writer.cancel()
        except grpc.aio.AioRpcError:
            pass
        finally:
            self.broken = True

    async def _write(self, call: Any) -> None:
        while True:
            await call.write(await self._frames.get())

    def _take(self, frame: pb.ReplicaFrame) -> None:
        if frame.HasField("load"):
            self.load = frame.load
        for delta in frame.deltas:
            sent = self._sent[delta.attempt_id]
            done = sent.completion
            assert not delta.token_ids or delta.first_index == len(done.token_ids), "a token is repeated or missing"
            done.token_ids += delta.token_ids
            done.logprobs += [
                SampledLogprobs(entry.logprob, list(entry.top_ids), list(entry.top_logprobs))
                for entry in delta.logprobs
            ]
            if delta.HasField("cached_tokens"):
                done.cached_tokens = delta.cached_tokens
            if delta.finish:
                sent.finish, done.error = delta.finish, delta.error
                sent.ended.set()


class RouterClient:
    """Streams to replicas, on a separate event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._streams: list[ServeStream] = []

    def connect(self, address: str) -> ServeStream:
        self._streams.append(ServeStream(address, self._loop))
        return self._streams[-1]

    def call(self, work: Coroutine[Any, Any, Any]) -> Any:
        future: concurrent.futures.Future[Any] = asyncio.run_coroutine_threadsafe(work, self._loop)
        return future.result(30)

    def close(self) -> None:
        for stream in self._streams:
            stream.close()
        self._loop.call_soon_threadsafe(self._loop.stop)

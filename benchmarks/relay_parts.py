"""Processes of benchmarks/relay.py: the origins of tokens, and what forwards them to HTTP clients.

    python benchmarks/relay_parts.py PART STEP_SECONDS ADDRESS

prints the number of the port that it listens on, and runs until stdin ends.
"""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

from headrace_base.cluster_member import NO_PROXY
from headrace_base.logs import LogConfig, configure_logs
from headrace_proto import CONTRACT_VERSION
from headrace_proto.replica_pb2 import (
    FINISH_LENGTH,
    Cancel,
    Delta,
    ReplicaFrame,
    RouterFrame,
    RouterHello,
    Sampling,
    Submit,
)
from headrace_proto.replica_pb2_grpc import ReplicaStub
from headrace_router.config import RouterConfig, StaticMember
from headrace_router.event_loop import exempt_from_collection, new_event_loop
from headrace_router.router_server import RouterServer
from support.members import MEMBER, METADATA, secret_file
from support.router.fake_replica import MODEL, FakeReplica
from support.router.tokenizer import make_tokenizer

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = json.dumps(
    {
        "id": "cmpl-0123456789abcdef0123456789abcdef",
        "object": "text_completion",
        "created": 1_700_000_000,
        "model": MODEL,
        "choices": [{"index": 0, "text": " word", "logprobs": None, "finish_reason": None}],
    }
).encode()
CHUNK = b"%x\r\ndata: %s\n\n\r\n" % (len(EVENT) + 8, EVENT)


class SteppedReplica(FakeReplica):
    """Sends one frame per step, with a token for each running request."""

    step_seconds = 0.05

    async def Serve(self, requests: Any, context: Any) -> AsyncIterator[ReplicaFrame]:
        reply = self.tokenizer.encode(self.reply, add_special_tokens=False).ids
        running: dict[bytes, tuple[int, int]] = {}  # tokens sent, and all

        async def read() -> None:
            async for frame in requests:
                for submit in frame.submits:
                    running[submit.attempt_id] = 0, submit.sampling.max_tokens
                for cancel in frame.cancels:
                    running.pop(cancel.attempt_id, None)

        reader = asyncio.create_task(read())
        try:
            yield ReplicaFrame(hello=self.facts().identity, step=self._step, load=self.load)
            while True:
                await asyncio.sleep(self.step_seconds)
                self._step += 1
                deltas = []
                for attempt, (sent, most) in list(running.items()):
                    delta = Delta(attempt_id=attempt, first_index=sent, token_ids=[reply[sent % len(reply)]])
                    running[attempt] = sent + 1, most
                    if sent + 1 == most:
                        delta.finish = FINISH_LENGTH
                        del running[attempt]
                    deltas.append(delta)
                yield ReplicaFrame(step=self._step, deltas=deltas, load=self.load)
        finally:
            reader.cancel()


class Requests(asyncio.Protocol):
    """Reads HTTP requests, as far as this benchmark needs it: `begin` gets each stream, `end` closed connections."""

    def __init__(self, begin: Callable[[asyncio.Transport], None], end: Callable[[asyncio.Transport], None]) -> None:
        self._begin, self._end = begin, end
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        fields = dict(line.lower().split(b": ", 1) for line in head.split(b"\r\n")[1:] if b": " in line)
        if not found or len(body) < int(fields.get(b"content-length", 0)):
            return
        self._received = b""
        if head.startswith(b"POST"):
            self._transport.write(HEAD)
            self._begin(self._transport)
        else:  # a gateway that looks at its worker
            facts = json.dumps({"model_path": MODEL, "data": [{"id": MODEL, "object": "model"}]}).encode()
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(facts)
            self._transport.write(head + facts)

    def connection_lost(self, error: Exception | None) -> None:
        self._end(self._transport)


async def _listen(begin: Callable[[asyncio.Transport], None], end: Callable[[asyncio.Transport], None]) -> int:
    server = await asyncio.get_running_loop().create_server(lambda: Requests(begin, end), "127.0.0.1", 0, backlog=1024)
    port: int = server.sockets[0].getsockname()[1]
    return port


async def replica(step_seconds: float, _: str) -> int:
    """The origin over gRPC."""
    made = SteppedReplica(make_tokenizer(), max_model_len=1 << 20)
    made.step_seconds = step_seconds
    await made.start()
    _KEPT.append(made)
    return int(made.address.rpartition(":")[2])


async def worker(step_seconds: float, _: str) -> int:
    """The origin over HTTP, for a router that forwards HTTP."""
    running: dict[asyncio.Transport, None] = {}

    async def step() -> None:
        while True:
            await asyncio.sleep(step_seconds)
            for transport in list(running):
                transport.write(CHUNK)

    _KEPT.append(asyncio.create_task(step()))
    return await _listen(lambda opened: running.update({opened: None}), lambda closed: running.pop(closed, None))


async def floor(_: float, address: str) -> int:
    """Forwards each token as a constant event: no text, no metrics, no limits, no errors."""
    outgoing: asyncio.Queue[RouterFrame] = asyncio.Queue()
    streams: dict[bytes, asyncio.Transport] = {}
    attempts: dict[asyncio.Transport, bytes] = {}

    async def frames() -> AsyncIterator[RouterFrame]:
        yield RouterFrame(hello=RouterHello(router_id="floor", contract_version=CONTRACT_VERSION))
        while True:
            yield await outgoing.get()

    async def forward() -> None:
        async with MEMBER.channel(address, NO_PROXY) as channel:
            async for frame in ReplicaStub(channel).Serve(frames(), metadata=METADATA):
                for delta in frame.deltas:
                    if (transport := streams.get(delta.attempt_id)) is not None:
                        transport.write(CHUNK)

    def begin(transport: asyncio.Transport) -> None:
        attempt = len(attempts).to_bytes(16, "big")
        streams[attempt], attempts[transport] = transport, attempt
        submit = Submit(attempt_id=attempt, prompt_token_ids=[5], sampling=Sampling(max_tokens=1 << 19))
        outgoing.put_nowait(RouterFrame(submits=[submit]))

    def end(transport: asyncio.Transport) -> None:
        if (attempt := attempts.get(transport)) is not None:
            streams.pop(attempt, None)
            outgoing.put_nowait(RouterFrame(cancels=[Cancel(attempt_id=attempt)]))

    _KEPT.append(asyncio.create_task(forward()))
    return await _listen(begin, end)


async def router(_: float, address: str) -> int:
    """A router, as it is."""
    configure_logs(LogConfig("router", stderr_level="error"))
    members = (StaticMember(address=address, replica_id="r0"),)
    made = RouterServer(RouterConfig(port=0, grpc_port=0, secret_file=secret_file(), members=members))
    await made.start()
    while not made.services.ready:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    exempt_from_collection()
    _KEPT.append(made)
    return made.http_port


PARTS = {part.__name__: part for part in (replica, worker, floor, router)}
_KEPT: list[object] = []  # until the process ends


async def _main(name: str, step_seconds: float, address: str) -> None:
    print(await PARTS[name](step_seconds, address), flush=True)
    await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        runner.run(_main(sys.argv[1], float(sys.argv[2]), sys.argv[3]))

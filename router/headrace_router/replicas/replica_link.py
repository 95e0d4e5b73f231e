"""The streams to the replicas: one gRPC connection updates each ReplicaState."""

import asyncio
import random
import secrets
import time
from typing import Any

import grpc
import structlog

from headrace_base.cluster_member import CLIENT, LARGE_MESSAGES, ClusterMember
from headrace_proto import CONTRACT_VERSION
from headrace_proto.control_pb2 import Member
from headrace_proto.duplex import run_duplex
from headrace_proto.replica_pb2 import (
    CacheWatchRequest,
    DescribeChunk,
    DescribeRequest,
    ModelFacts,
    ReplicaFrame,
    RouterFrame,
    RouterHello,
)
from headrace_proto.replica_pb2_grpc import ReplicaStub
from headrace_router.core.prefix_index import PrefixIndex
from headrace_router.core.replica_blocks import MissedEventsError, ReplicaBlocks
from headrace_router.core.replica_state import ReplicaState
from headrace_router.replicas.card_cache import CardCache
from headrace_router.text.model_card import ModelCard, ModelFactsError

CHUNK_SECONDS = 10.0  # a replica that sends nothing for so long delays the others of its model no longer
FETCH_SECONDS = 60.0


async def fetch_model(stub: Any, cards: CardCache, metadata: Any) -> tuple[ModelFacts, ModelCard]:
    """The facts of the replica, and the card of its model. Replicas share tokenizers: one link fetches each.

    stub: of headrace.v1.Replica; metadata: of its calls.

    A tokenizer has megabytes: while one link fetches it, those of other replicas with the same digest wait. If that
    fetch fails, the next one of them fetches.
    Raises ModelFactsError, AioRpcError and TimeoutError.
    """
    request = DescribeRequest(known_digest=cards.newest_digest, facts_only=True)
    facts, _ = await _describe(stub.Describe(request, metadata=metadata))
    digest = facts.tokenizer_digest
    if not cards.has_tokenizer(digest):
        async with cards.fetching(digest):
            if not cards.has_tokenizer(digest):
                facts, tokenizer_json = await _describe(stub.Describe(DescribeRequest(), metadata=metadata))
                await cards.add_tokenizer(facts.tokenizer_digest, tokenizer_json)
    return facts, await cards.card(facts)


async def _describe(call: Any) -> tuple[ModelFacts, bytes]:
    facts: ModelFacts | None = None
    tokenizer_json = bytearray()
    try:
        async with asyncio.timeout(FETCH_SECONDS):
            while (chunk := await _read(call)) is not None:
                if not chunk.HasField("facts"):
                    tokenizer_json += chunk.tokenizer_json
                    continue
                facts = chunk.facts
    finally:
        call.cancel()
    if facts is None:
        raise ModelFactsError("the replica described no model")
    return facts, bytes(tokenizer_json)


async def _read(call: Any) -> DescribeChunk | None:
    async with asyncio.timeout(CHUNK_SECONDS):
        chunk: DescribeChunk | Any = await call.read()
    return None if chunk is grpc.aio.EOF else chunk


_OPTIONS = (*LARGE_MESSAGES, *CLIENT)
CONNECT_SECONDS = 5.0
FIRST_BACKOFF = 0.05
LAST_BACKOFF = 1.0
LEAST_EVENT_MS = 20
EVENTS_PER_SECOND = 1000  # messages with cache events, of all replicas
SWEEP_SECONDS = 0.2  # until it is checked again whether the index has room for a replica that clears its blocks often
LEAST_REPORT_MS = 20
LONGEST_REPORT_MS = 1000  # a stall is found so much later
REPORTS_PER_SECOND = 2000  # frames without tokens, of all replicas

log = structlog.get_logger("headrace.router.replica")


class ReplicaLinks:
    """Opens a link for each replica; `drain` waits for the links that are closing."""

    def __init__(
        self,
        *,
        router_id: str,
        member: ClusterMember,
        cards: CardCache,
        stall_seconds: float,
        index: PrefixIndex | None,
    ) -> None:
        """stall_seconds: without a heartbeat until a connected replica counts as lost.

        index: of the blocks of all replicas; None = they are not followed.
        """
        self.router_id = router_id
        self.member = member
        self.cards = cards
        self.stall_seconds = stall_seconds
        self.index = index
        self._tasks: set[asyncio.Task[None]] = set()

    def open(self, member: Member) -> "ReplicaLink":
        """Starts to connect, and reconnects until the link is closed."""
        link = ReplicaLink(self, member)
        self._tasks.add(link.task)
        link.task.add_done_callback(self._tasks.discard)
        return link

    @property
    def event_interval_ms(self) -> int:
        """Between two messages with cache events of one replica."""
        return max(LEAST_EVENT_MS, 1000 * len(self._tasks) // EVENTS_PER_SECOND)

    @property
    def report_interval_ms(self) -> int:
        """Between two frames without tokens of one replica."""
        return min(LONGEST_REPORT_MS, max(LEAST_REPORT_MS, 1000 * len(self._tasks) // REPORTS_PER_SECOND))

    async def drain(self) -> None:
        """Returns when every closed link has ended."""
        await asyncio.gather(*self._tasks, return_exceptions=True)


class ReplicaLink:
    """Keeps a Serve stream open to one replica, and its state up to date."""

    def __init__(self, links: ReplicaLinks, member: Member) -> None:
        self._links = links
        self._wake = asyncio.Event()
        self._stream: asyncio.Timeout | None = None  # has no deadline until `check_stall` ends the open stream
        self.state: ReplicaState[ModelCard] = ReplicaState(
            member,
            clock=time.monotonic,
            new_id=lambda: secrets.token_bytes(16),  # attempt ids are random
            on_send=self._wake.set,
            blocks=ReplicaBlocks(links.index) if links.index is not None else None,
        )
        self.task = asyncio.create_task(self._run(), name=f"replica {member.address}")

    def close(self) -> None:
        """Ends the stream, which ends every attempt on it."""
        self.task.cancel()

    def check_stall(self) -> None:
        """Ends the stream, to open another one, if the replica has made no step for `stall_seconds`."""
        if self._stream is not None and self.state.silent(self._links.stall_seconds):
            self._stream.reschedule(0.0)
            self._stream = None

    async def _run(self) -> None:
        replica, backoff = self.state, FIRST_BACKOFF
        try:
            while True:
                began = time.monotonic()
                try:
                    await self._serve()
                    reason = "the replica ended the stream"
                except grpc.aio.AioRpcError as error:
                    reason = f"{error.code().name}: {error.details() or ''}"[:200]
                except (ModelFactsError, TimeoutError, ConnectionError) as error:
                    reason = str(error) or type(error).__name__
                except Exception:
                    # A bug of ours must not end the link permanently.
                    log.exception("replica link failed", replica=replica.replica_id)
                    reason = "internal error"
                replica.disconnect()
                if replica.listing is None:
                    return
                report = log.info if replica.leaving else log.warning
                report("replica stream lost", replica=replica.replica_id, address=replica.address, reason=reason)
                backoff = FIRST_BACKOFF if time.monotonic() - began > 5 else min(2 * backoff, LAST_BACKOFF)
                await asyncio.sleep(backoff * random.uniform(0.5, 1.5))
        finally:
            replica.disconnect()

    async def _serve(self) -> None:
        async with self._links.member.channel(self.state.address, _OPTIONS) as channel:
            # No asyncio.wait_for: in Python 3.11 it loses a cancel that coincides with a result; close() would hang.
            async with asyncio.timeout(CONNECT_SECONDS):
                await channel.channel_ready()
            stub: Any = ReplicaStub(channel)
            self.state.describe(*await fetch_model(stub, self._links.cards, self._links.member.metadata))
            call = stub.Serve(metadata=self._links.member.metadata)
            interval_ms = self._links.report_interval_ms
            self.state.report_seconds = interval_ms / 1e3
            hello = RouterHello(
                router_id=self._links.router_id, contract_version=CONTRACT_VERSION, report_interval_ms=interval_ms
            )
            await call.write(RouterFrame(hello=hello))
            following = asyncio.create_task(self._follow_cache(stub))
            try:
                async with asyncio.timeout(None) as self._stream:
                    await run_duplex(self._read(call), self._write(call))
            except TimeoutError:
                raise ConnectionError("no step of the replica was received for too long") from None
            finally:
                self._stream = None
                call.cancel()
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)

    async def _read(self, call: Any) -> None:
        replica = self.state
        # Later reads have no timeout: after a pause of this process it would expire before the frames are read.
        async with asyncio.timeout(self._links.stall_seconds):
            frame: ReplicaFrame | Any = await call.read()
        while frame is not grpc.aio.EOF:
            replica.receive(frame)
            if frame.HasField("hello"):
                log.info("replica connected", replica=replica.replica_id, address=replica.address)
            frame = await call.read()

    async def _follow_cache(self, stub: Any) -> None:
        """Which blocks the replica holds, as long as its stream is open. Requests do not depend on it."""
        blocks = self.state.blocks
        if blocks is None or self.state.scheme is None:
            return
        request = CacheWatchRequest(router_id=self._links.router_id, interval_ms=self._links.event_interval_ms)
        while True:
            call = stub.WatchCache(request, metadata=self._links.member.metadata)
            try:
                async for frame in call:
                    while not blocks.may_receive(frame):  # noqa: ASYNC110
                        await asyncio.sleep(SWEEP_SECONDS)
                    for _ in blocks.slices(frame):
                        self.state.set_changed()
                        await asyncio.sleep(0)
                    self.state.set_changed()
            except (grpc.aio.AioRpcError, MissedEventsError) as error:
                reason = error.code().name if isinstance(error, grpc.aio.AioRpcError) else "events are missing"
                log.info("cache events end", replica=self.state.replica_id, reason=reason)
            except Exception:
                log.exception("cache events failed", replica=self.state.replica_id)
            finally:
                call.cancel()
                blocks.lost()
            await asyncio.sleep(LAST_BACKOFF * random.uniform(0.5, 1.5))

    async def _write(self, call: Any) -> None:
        while True:
            frame = self.state.submit_queue.take()
            if frame is None:
                self._wake.clear()
                await self._wake.wait()
            else:
                await call.write(frame)

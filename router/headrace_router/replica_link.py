"""The router's side of one replica: one stream, its heartbeat, and the attempts that run on it."""

import asyncio
import contextlib
import secrets
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import grpc
import structlog

from headrace_proto import CONTRACT_VERSION
from headrace_proto.control_pb2 import Member
from headrace_proto.duplex import both_ways
from headrace_proto.replica_pb2 import (
    REPLICA_STATE_READY,
    ROLE_PREFILL,
    DescribeRequest,
    Load,
    ModelFacts,
    ReplicaFrame,
    ReplicaIdentity,
    Role,
    RouterFrame,
    RouterHello,
    Submit,
)
from headrace_proto.replica_pb2_grpc import ReplicaStub
from headrace_proto.secret import secret_metadata
from headrace_router.attempt import Attempt, OnTokens, Outcome
from headrace_router.card_cache import CardCache
from headrace_router.model_card import ModelCard, ModelFactsError
from headrace_router.outbox import Outbox

MAX_MESSAGE_BYTES = 64 << 20
CONNECT_SECONDS = 5.0
DESCRIBE_SECONDS = 60.0
FIRST_BACKOFF = 0.05
LAST_BACKOFF = 1.0
STALL_SECONDS = 2.0
STALL_STEPS = 4.0

log = structlog.get_logger("headrace.router.replica")


class ReplicaLink:
    """Keeps a Serve stream open to one member for as long as it is one.

    Ready = connected, the controller says so, not draining, and its step counter moved within
    max(2 s, 4 x the predicted step). A stalled replica gets no new work; after `stall_seconds` it counts as lost.
    """

    def __init__(
        self,
        member: Member,
        *,
        router_id: str,
        secret: bytes,
        cards: CardCache,
        stall_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.address = member.address
        self.listed_ready = False
        self.identity: ReplicaIdentity = member.identity
        self.facts: ModelFacts | None = None
        self.card: ModelCard | None = None
        self.load = Load()
        self.attempts: dict[bytes, Attempt] = {}
        self._router_id = router_id
        self._metadata = secret_metadata(secret)
        self._cards = cards
        self._stall_seconds = stall_seconds
        self._clock = clock
        self.looks_stalled = 0  # in a row, by the fleet
        self._connected = False
        self._step = -1
        self._heartbeat = 0.0
        self._unreported: deque[tuple[int, int]] = deque()  # step seen when it was sent, tokens to compute there
        self._outbox = Outbox()
        self._task: asyncio.Task[None] | None = None
        self._retired = False
        self._listed_role: Role = member.identity.role
        self._promised: dict[bytes, int] = {}
        self.listed(member)

    # What the rest of the router sees

    @property
    def replica_id(self) -> str:
        return self.identity.replica_id or self.address

    @property
    def role(self) -> Role:
        """What the controller says; without one, what the replica says."""
        return self._listed_role or self.identity.role

    @property
    def unreported(self) -> int:
        return len(self._unreported)

    @property
    def unreported_tokens(self) -> int:
        """Tokens to compute that its load cannot contain yet."""
        return sum(tokens for _, tokens in self._unreported)

    @property
    def connected(self) -> bool:
        return self._connected

    @property
    def silence(self) -> float:
        """Seconds since the step loop's last sign of life."""
        return self._clock() - self._heartbeat

    @property
    def stalled(self) -> bool:
        """Whether the step loop has been silent for too long to be merely busy."""
        return self.silence > max(STALL_SECONDS, STALL_STEPS * self.load.predicted_step_ms / 1e3)

    @property
    def ready(self) -> bool:
        """Whether new work may go there."""
        return self._well and self.role != ROLE_PREFILL

    @property
    def ready_source(self) -> bool:
        """Whether it computes prompts for others."""
        return self._well and self.role == ROLE_PREFILL

    @property
    def promised_tokens(self) -> int:
        """Tokens of prompts that this router sent its way and that are not known to be computed."""
        return sum(self._promised.values())

    def promise(self, attempt_id: bytes, tokens: int) -> None:
        """A prompt is on its way to it through another replica."""
        self._promised[attempt_id] = tokens

    def promise_kept(self, attempt_id: bytes) -> None:
        self._promised.pop(attempt_id, None)

    @property
    def _well(self) -> bool:
        return (
            self._connected and self.listed_ready and not self._retired and not self.load.draining and not self.stalled
        )

    def start(self) -> None:
        self._task = asyncio.create_task(self._run(), name=f"replica {self.address}")

    def listed(self, member: Member) -> None:
        """The controller's newest word about this member."""
        self.listed_ready = member.state == REPLICA_STATE_READY
        self._listed_role = member.identity.role
        self._retired = False

    def retire(self) -> None:
        """No longer a member: nothing new goes there, what runs may finish."""
        self._retired = True

    @property
    def retired_and_idle(self) -> bool:
        return self._retired and not self.attempts

    async def close(self) -> None:
        """Ends the stream, which cancels every attempt on it."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def submit(self, submit: Submit, on_tokens: OnTokens) -> Attempt:
        """Starts an attempt; its id is drawn here (RELIABILITY R12). The submit leaves with the next frame."""
        submit.attempt_id = secrets.token_bytes(16)
        attempt = Attempt(submit.attempt_id, len(submit.output_token_ids), on_tokens, self._outbox.cancel)
        self.attempts[attempt.id] = attempt
        attempt.outcome.add_done_callback(lambda _: self.attempts.pop(attempt.id, None))
        if not self._connected:
            attempt.end(Outcome.LOST)
            return attempt
        elsewhere = submit.HasField("source")
        tokens = 0 if elsewhere else len(submit.prompt_token_ids) + len(submit.output_token_ids)
        self._unreported.append((self._step, tokens))
        self._outbox.submit(submit)
        return attempt

    def newest_started(self) -> Attempt | None:
        """The attempt that came last of those that have given tokens: it has the least to take along."""
        return next((entry for entry in reversed(self.attempts.values()) if entry.open and entry.started), None)

    def give_up(self) -> None:
        """Calls off all attempts, so that they go on elsewhere; what still comes of them is dropped."""
        for attempt in list(self.attempts.values()):
            attempt.end(Outcome.LOST)

    # The stream

    async def _run(self) -> None:
        backoff = FIRST_BACKOFF
        try:
            while True:
                began = self._clock()
                try:
                    await self._serve()
                    reason = "the replica ended the stream"
                except grpc.aio.AioRpcError as error:
                    reason = f"{error.code().name}: {error.details() or ''}"[:200]
                except (ModelFactsError, TimeoutError, ConnectionError) as error:
                    reason = str(error) or type(error).__name__
                except Exception:
                    # A bug of ours must not end the link for good.
                    log.exception("replica link failed", replica=self.replica_id)
                    reason = "internal error"
                self._disconnected()
                if self._retired:
                    return
                log.warning("replica stream lost", replica=self.replica_id, address=self.address, reason=reason)
                backoff = FIRST_BACKOFF if self._clock() - began > 5 else min(2 * backoff, LAST_BACKOFF)
                await asyncio.sleep(backoff)
        finally:
            self._disconnected()

    def _disconnected(self) -> None:
        self._connected = False
        self._unreported.clear()
        self.give_up()
        self._outbox.clear()

    async def _serve(self) -> None:
        options = [
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.enable_http_proxy", 0),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        async with grpc.aio.insecure_channel(self.address, options=options) as channel:
            # Never asyncio.wait_for here: in Python 3.11 it loses a cancel that meets a result, and close() would hang.
            async with asyncio.timeout(CONNECT_SECONDS):
                await channel.channel_ready()
            stub: Any = ReplicaStub(channel)
            async with asyncio.timeout(DESCRIBE_SECONDS):
                self.facts, self.card = await self._describe(stub)
            call = stub.Serve(metadata=self._metadata)
            hello = RouterHello(router_id=self._router_id, contract_version=CONTRACT_VERSION)
            await call.write(RouterFrame(hello=hello))
            try:
                await both_ways(self._read(call), self._write(call))
            finally:
                call.cancel()

    async def _describe(self, stub: Any) -> tuple[ModelFacts, ModelCard]:
        facts: ModelFacts | None = None
        tokenizer_json = bytearray()
        request = DescribeRequest(known_digest=self._cards.newest_digest)
        async for chunk in stub.Describe(request, metadata=self._metadata):
            if chunk.HasField("facts"):
                facts = chunk.facts
            else:
                tokenizer_json += chunk.tokenizer_json
        if facts is None:
            raise ModelFactsError("the replica described no model")
        if facts.identity.boot_id != self.identity.boot_id:
            self.load = Load()  # what an earlier process reported means nothing now
        self.identity = facts.identity
        return facts, await self._cards.card(facts, bytes(tokenizer_json))

    async def _read(self, call: Any) -> None:
        while True:
            async with asyncio.timeout(self._read_seconds()):
                frame: ReplicaFrame | Any = await call.read()
            if frame is grpc.aio.EOF:
                return
            if frame.HasField("hello"):
                self.identity = frame.hello
                self._step, self._heartbeat = -1, self._clock()
                self._connected = True
                log.info("replica connected", replica=self.replica_id, address=self.address)
            if frame.HasField("load"):
                self.load = frame.load
            for delta in frame.deltas:
                attempt = self.attempts.get(delta.attempt_id)
                if attempt is not None:
                    attempt.receive(delta)
            if frame.step > self._step:
                self._stepped(frame.step)
            elif self.silence > self._read_seconds():
                raise ConnectionError("the replica sends frames, but its step loop stands still")

    def _read_seconds(self) -> float:
        return max(self._stall_seconds, STALL_STEPS * self.load.predicted_step_ms / 1e3)

    def _stepped(self, step: int) -> None:
        self._step, self._heartbeat = step, self._clock()
        # Two steps after it was sent, a submit is in the load that the replica reports.
        while self._unreported and step >= self._unreported[0][0] + 2:
            self._unreported.popleft()

    async def _write(self, call: Any) -> None:
        while True:
            await call.write(await self._outbox.next_frame())

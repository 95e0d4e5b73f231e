"""One replica's state in this router: pure; frames, time and attempt ids are passed in."""

from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

from headrace_proto.control_pb2 import Member
from headrace_proto.replica_pb2 import (
    REPLICA_STATE_DRAINING,
    REPLICA_STATE_READY,
    REPLICA_STATE_UNHEALTHY,
    ROLE_PREFILL,
    Load,
    ModelFacts,
    ReplicaFrame,
    ReplicaIdentity,
    Role,
    Submit,
)
from headrace_proto.stall import STALL_SECONDS, stall_limit
from headrace_proto.trial import RESERVED_SECONDS
from headrace_router.core.attempt import Attempt, OnTokens, Outcome
from headrace_router.core.heartbeat import Heartbeat
from headrace_router.core.prefix.hash_scheme import HashScheme
from headrace_router.core.prefix.prompt_blocks import PromptBlocks
from headrace_router.core.prefix.replica_blocks import ReplicaBlocks
from headrace_router.core.sampling_options import default_options
from headrace_router.core.step_speed import StepSpeed
from headrace_router.core.submit_queue import SubmitQueue
from headrace_router.core.unreported import Unreported

_SERVING = (REPLICA_STATE_READY, REPLICA_STATE_UNHEALTHY)
C = TypeVar("C")  # the owner's type of what it keeps per model: tokenizer, template


class ReplicaState(Generic[C]):
    """Its load, its heartbeat, and the attempts that run there.

    Ready = connected, listed by the controller, not draining, and its step counter moved within
    max(2 s, 4 x the predicted step). A stalled replica gets no new work. That the controller lists it as unhealthy does
    not count: this router hears it itself.
    """

    def __init__(
        self,
        member: Member,
        *,
        clock: Callable[[], float],
        new_id: Callable[[], bytes],
        on_send: Callable[[], None],
        blocks: ReplicaBlocks | None = None,
    ) -> None:
        """`on_send` is called when the queue has messages for the replica. `blocks`: what its cache holds."""
        self.listing: Member | None = member  # the newest entry of the member list; None = no longer a member
        self.address = member.address
        self.identity: ReplicaIdentity = member.identity
        self.model = self.revision = ""  # until it is described
        self.defaults: Mapping[str, float] = {}  # of options that requests may omit
        self.facts: ModelFacts | None = None
        self.card: C | None = None
        self.load = Load()
        self.connected = False
        self.attempts: dict[bytes, Attempt] = {}
        self.remote_prompts: dict[bytes, int] = {}  # by attempt: tokens that another replica will fetch from this one
        self.blocks = blocks
        self.scheme: HashScheme | None = None  # of its blocks
        self.rows = self.step_tokens = 0  # see `Candidate`
        self.submit_queue = SubmitQueue(on_send)
        self.speed = StepSpeed()
        self.arriving: set[bytes] = set()  # attempts that continue a stream and have no new tokens yet
        self.isolated_attempt = b""  # it runs alone: nothing else is placed here until it ends
        self._clock = clock
        self._new_id = new_id
        self._heartbeat = Heartbeat(clock)
        self._reserved_until = 0.0
        self._unreported = Unreported()

    # What policies read

    @property
    def replica_id(self) -> str:
        return self.identity.replica_id or self.address

    @property
    def build(self) -> tuple[str, int]:
        """Id and generation: during a rollout two builds of a replica may be ready."""
        return self.replica_id, self.identity.generation

    @property
    def role(self) -> Role:
        """As the controller lists it; without a controller, as the replica reports it."""
        if self.listing is not None and self.listing.identity.role:
            return self.listing.identity.role
        return self.identity.role

    @property
    def unreported(self) -> int:
        """Attempts that were sent and that its reported load does not include yet."""
        return len(self._unreported)

    @property
    def unreported_tokens(self) -> int:
        """Tokens of these attempts that will be computed there."""
        return self._unreported.tokens

    @property
    def remote_prompt_tokens(self) -> int:
        """Tokens of this router's prompts that other replicas fetch from this one, not known to be computed."""
        return sum(self.remote_prompts.values())

    @property
    def seconds_since_step(self) -> float:
        """Seconds since its step counter moved."""
        return self._heartbeat.seconds

    @property
    def progress(self) -> tuple[bytes, int]:
        """For `has_stepped_since`."""
        return self.identity.boot_id, self._heartbeat.moves

    def has_stepped_since(self, progress: tuple[bytes, int]) -> bool:
        """Whether the process of that time is connected and its step counter has moved since."""
        boot_id, moves = progress
        return self.connected and self.identity.boot_id == boot_id and self._heartbeat.moves > moves

    @property
    def stalled(self) -> bool:
        """Whether the step loop has not moved for longer than a long step would explain."""
        return self._heartbeat.seconds > self.stall_limit(STALL_SECONDS)

    def silent(self, seconds: float) -> bool:
        """Whether the open stream has brought no step for that long: it is closed then, and opened again."""
        return self.connected and self._heartbeat.silent_seconds > self.stall_limit(seconds)

    def stall_limit(self, seconds: float) -> float:
        """Seconds without a step until it counts as stalled, at least `seconds`."""
        return stall_limit(self.load.predicted_step_ms / 1e3, seconds)

    @property
    def requests(self) -> int:
        """Attempts of all routers that run or wait there, or were sent by this one."""
        return self.load.running + self.load.waiting + self.unreported

    @property
    def has_room(self) -> bool:
        """Whether one more attempt runs at once, as far as its rows decide."""
        return not self.rows or self.requests < self.rows

    @property
    def kv_tokens(self) -> float:
        """Tokens in its KV cache, as far as its facts are known."""
        if self.facts is None:
            return 0.0
        return self.load.kv_usage * self.facts.kv_blocks * self.facts.identity.kv_layout.block_size

    @property
    def isolated(self) -> bool:
        """Whether an attempt runs there alone."""
        return self.isolated_attempt in self.attempts

    @property
    def reserved(self) -> bool:
        """Whether a choice of any router runs there alone, or waits to."""
        return self.reserved_here or self.load.reserved

    @property
    def reserved_here(self) -> bool:
        """Whether a choice of this router waits to run there alone."""
        return self._clock() < self._reserved_until

    def reserve(self) -> None:
        """For a short time, for a choice that must run alone: longer than the pause between two searches."""
        self._reserved_until = self._clock() + RESERVED_SECONDS
        if self.connected:
            self.submit_queue.reserve()

    def isolate(self, attempt_id: bytes) -> None:
        """The attempt runs there alone from now on."""
        self.isolated_attempt = attempt_id
        self._reserved_until = 0.0

    @property
    def leaving(self) -> bool:
        """Whether it is drained: the end of its attempts is no failure."""
        return self.load.draining or (self.listing is not None and self.listing.state == REPLICA_STATE_DRAINING)

    @property
    def heard(self) -> bool:
        """Whether its stream is open and its step loop moves."""
        return self.connected and not self.stalled

    @property
    def ready(self) -> bool:
        """Whether it takes new requests."""
        return self._usable and self.role != ROLE_PREFILL

    @property
    def ready_source(self) -> bool:
        """Whether it computes prompts for other replicas."""
        return self._usable and self.role == ROLE_PREFILL

    @property
    def _usable(self) -> bool:
        listed = self.listing is not None and self.listing.state in _SERVING
        return self.heard and self.facts is not None and listed and not self.load.draining

    # Attempts

    def submit(
        self,
        submit: Submit,
        on_tokens: OnTokens,
        on_end: Callable[[Attempt], None],
        cached: int = 0,
        prompt: PromptBlocks | None = None,
    ) -> Attempt:
        """Starts an attempt under a new id (docs/reliability.md R12). The submit is sent with the next frame.

        cached: tokens of its prompt that are expected in the replica's cache. prompt: its blocks, if they are known.
        """

        def ended(attempt: Attempt) -> None:
            self.attempts.pop(attempt.id, None)
            self._unreported.discard(attempt.id)
            self.arriving.discard(attempt.id)
            if self.blocks is not None:
                self.blocks.ended(attempt.id, self._clock())
            on_end(attempt)

        submit.attempt_id = self._new_id()
        attempt = Attempt(submit.attempt_id, len(submit.output_token_ids), on_tokens, ended, self.submit_queue.cancel)
        self.attempts[attempt.id] = attempt
        if not self.connected:
            attempt.end(Outcome.LOST)
            return attempt
        remote = submit.HasField("source")
        tokens = 0 if remote else len(submit.prompt_token_ids) + len(submit.output_token_ids) - cached
        self._unreported.add(attempt.id, tokens, self._heartbeat.step)
        if submit.output_token_ids:
            self.arriving.add(attempt.id)
        if self.blocks is not None and prompt is not None:
            self.blocks.expect(attempt.id, prompt.digests)
        self.submit_queue.submit(submit)
        return attempt

    def newest_started(self) -> Attempt | None:
        """The newest attempt that has produced tokens: it has the least KV to transfer."""
        return next((entry for entry in reversed(self.attempts.values()) if entry.open and entry.started), None)

    def end_attempts(self) -> None:
        """Ends all attempts as lost, so that they continue on other replicas; their later deltas are dropped."""
        for attempt in list(self.attempts.values()):
            attempt.end(Outcome.LOST)

    # The stream

    def describe(self, facts: ModelFacts, card: C) -> None:
        """Applies what the replica reports of itself when it is connected. card: what the owner made of the facts."""
        if facts.identity.boot_id != self.identity.boot_id:
            self.load, self.speed = Load(), StepSpeed()  # an earlier process's reports are invalid
        self.identity, self.facts, self.card = facts.identity, facts, card
        self.model, self.revision = facts.identity.model, facts.identity.revision
        self.defaults = default_options(facts)
        self.scheme = HashScheme.of(facts)
        self.rows, self.step_tokens = facts.max_num_seqs, facts.max_num_batched_tokens

    def receive(self, frame: ReplicaFrame) -> bool:
        """Processes one frame of the replica. Returns whether its step counter moved."""
        if frame.HasField("hello"):
            self._heartbeat.opened(frame.hello.boot_id, frame.step, stalled=self.stalled)
            self.identity, self.connected = frame.hello, True
            self.speed.restart()
        if frame.HasField("load"):
            self.load = frame.load
        if frame.HasField("submits"):
            for attempt_id in self.submit_queue.take_reported(frame.submits):
                self._unreported.discard(attempt_id)
        for delta in frame.deltas:
            attempt = self.attempts.get(delta.attempt_id)
            if attempt is not None:
                attempt.receive(delta)
        if not self._heartbeat.stepped(frame.step):
            return False
        self.speed.add(frame.step, self.load, self._clock())
        if not frame.HasField("submits"):
            # A replica of the release before: two steps after it was queued, its load is assumed to include a submit.
            self._unreported.discard_until(frame.step - 2)
        return True

    def extend_heartbeat(self, seconds: float) -> None:
        """This process was paused: the replica's frames of that time are not read yet."""
        self._heartbeat.extend(seconds)

    def disconnect(self) -> None:
        """The stream has ended, and with it every attempt on it."""
        self.connected = False
        self._unreported.clear()
        self.end_attempts()
        self.submit_queue.clear()

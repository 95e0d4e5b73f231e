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
from headrace_router.core.sampling_options import default_options
from headrace_router.core.step_speed import StepSpeed
from headrace_router.core.submit_queue import SubmitQueue

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
    ) -> None:
        """`on_send` is called when the queue has messages for the replica."""
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
        self.submit_queue = SubmitQueue(on_send)
        self.speed = StepSpeed()
        self.arriving: set[bytes] = set()  # attempts that continue a stream and have no new tokens yet
        self.isolated_attempt = b""  # it runs alone: nothing else is placed here until it ends
        self._clock = clock
        self._new_id = new_id
        self._boot_id: bytes | None = None  # of the process at the other end of the last stream
        self._step = -1  # the newest
        self._moves = 0  # of the step counter, seen on one stream
        self._heartbeat = 0.0
        self._opened = 0.0  # when the stream was opened
        self._reserved_until = 0.0
        self._unreported: dict[bytes, tuple[int, int]] = {}  # tokens to compute there, newest step when it was queued

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
        return sum(tokens for tokens, _ in self._unreported.values())

    @property
    def remote_prompt_tokens(self) -> int:
        """Tokens of this router's prompts that other replicas fetch from this one, not known to be computed."""
        return sum(self.remote_prompts.values())

    @property
    def seconds_since_step(self) -> float:
        """Seconds since its step counter moved."""
        return self._clock() - self._heartbeat

    @property
    def progress(self) -> tuple[bytes, int]:
        """For `has_stepped_since`."""
        return self.identity.boot_id, self._moves

    def has_stepped_since(self, progress: tuple[bytes, int]) -> bool:
        """Whether the process of that time is connected and its step counter has moved since."""
        boot_id, moves = progress
        return self.connected and self.identity.boot_id == boot_id and self._moves > moves

    @property
    def stalled(self) -> bool:
        """Whether the step loop has not moved for longer than a long step would explain."""
        return self.seconds_since_step > self.stall_limit(STALL_SECONDS)

    def silent(self, seconds: float) -> bool:
        """Whether the open stream has brought no step for that long: it is closed then, and opened again."""
        last = max(self._heartbeat, self._opened)
        return self.connected and self._clock() - last > self.stall_limit(seconds)

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
        rows = self.facts.max_num_seqs if self.facts is not None else 0
        return not rows or self.requests < rows

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

    def submit(self, submit: Submit, on_tokens: OnTokens, on_end: Callable[[Attempt], None]) -> Attempt:
        """Starts an attempt under a new id (docs/reliability.md R12). The submit is sent with the next frame."""

        def ended(attempt: Attempt) -> None:
            self.attempts.pop(attempt.id, None)
            self._unreported.pop(attempt.id, None)
            self.arriving.discard(attempt.id)
            on_end(attempt)

        submit.attempt_id = self._new_id()
        attempt = Attempt(submit.attempt_id, len(submit.output_token_ids), on_tokens, ended, self.submit_queue.cancel)
        self.attempts[attempt.id] = attempt
        if not self.connected:
            attempt.end(Outcome.LOST)
            return attempt
        remote = submit.HasField("source")
        tokens = 0 if remote else len(submit.prompt_token_ids) + len(submit.output_token_ids)
        self._unreported[attempt.id] = tokens, self._step
        if submit.output_token_ids:
            self.arriving.add(attempt.id)
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

    def receive(self, frame: ReplicaFrame) -> bool:
        """Processes one frame of the replica. Returns whether its step counter moved."""
        if frame.HasField("hello"):
            # A process whose step loop hangs may still connect: it counts as stalled until it makes a step.
            if frame.hello.boot_id != self._boot_id or not self.stalled:
                self._heartbeat = self._clock()
            self._boot_id, self.identity, self._step = frame.hello.boot_id, frame.hello, frame.step
            self.speed.restart()
            self.connected, self._opened = True, self._clock()
        if frame.HasField("load"):
            self.load = frame.load
        if frame.HasField("submits"):
            for attempt_id in self.submit_queue.take_reported(frame.submits):
                self._unreported.pop(attempt_id, None)
        for delta in frame.deltas:
            attempt = self.attempts.get(delta.attempt_id)
            if attempt is not None:
                attempt.receive(delta)
        if frame.step <= self._step:
            return False
        self._moves += self._step > 0  # the first one after a hello may be of an earlier time
        self._step, self._heartbeat = frame.step, self._clock()
        self.speed.add(frame.step, self.load, self._heartbeat)
        if not frame.HasField("submits"):
            # A replica of the release before: two steps after it was queued, its load is assumed to include a submit.
            for attempt_id in [key for key, (_, step) in self._unreported.items() if frame.step >= step + 2]:
                del self._unreported[attempt_id]
        return True

    def extend_heartbeat(self, seconds: float) -> None:
        """This process was paused: the replica's frames of that time are not read yet."""
        now = self._clock()
        self._heartbeat, self._opened = min(now, self._heartbeat + seconds), min(now, self._opened + seconds)

    def disconnect(self) -> None:
        """The stream has ended, and with it every attempt on it."""
        self.connected = False
        self._unreported.clear()
        self.end_attempts()
        self.submit_queue.clear()

"""One replica's state in this router: pure; frames, time and attempt ids are passed in."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
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
from headrace_router.core.attempt import Attempt, OnTokens, Outcome, SubmitQueue
from headrace_router.core.replica_blocks import HashScheme, PromptBlocks, ReplicaBlocks
from headrace_router.core.sampling_options import default_options
from headrace_router.core.step_speed import StepMilliseconds, StepSpeed


class Heartbeat:
    """Whether a replica's step loop moves: its step counter, over all of its streams."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.step = -1  # the newest
        self._clock = clock
        self._boot_id: bytes | None = None  # boot id of the process at the other end of the last stream
        self.at = 0.0  # when the counter moved
        self._opened = 0.0  # when the stream was opened

    @property
    def seconds(self) -> float:
        """Since the step counter moved."""
        return self._clock() - self.at

    @property
    def silent_seconds(self) -> float:
        """Since it moved, or the stream was opened."""
        return self._clock() - max(self.at, self._opened)

    def opened(self, boot_id: bytes, step: int, *, stalled: bool) -> None:
        """A stream was opened, to this process.

        A process whose step loop hangs may still connect: it counts as stalled until it makes a step.
        """
        if boot_id != self._boot_id or not stalled:
            self.at = self._clock()
        self._boot_id, self.step, self._opened = boot_id, step, self._clock()

    def stepped(self, step: int) -> bool:
        """The stream brought this number. Returns whether the counter moved."""
        if step <= self.step:
            return False
        self.step, self.at = step, self._clock()
        return True

    def extend(self, seconds: float) -> None:
        """This process was paused: the replica's frames of that time are not read yet."""
        now = self._clock()
        self.at, self._opened = min(now, self.at + seconds), min(now, self._opened + seconds)


class Unreported:
    """Attempts that were sent to a replica and that its load does not include yet, with the tokens of each."""

    def __init__(self) -> None:
        self._attempts: dict[bytes, int] = {}
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._attempts)

    def __contains__(self, attempt_id: bytes) -> bool:
        return attempt_id in self._attempts

    def add(self, attempt_id: bytes, tokens: int) -> None:
        self._attempts[attempt_id] = tokens
        self.tokens += tokens

    def discard(self, attempt_id: bytes) -> None:
        """It is reported, or has ended."""
        self.tokens -= self._attempts.pop(attempt_id, 0)

    def clear(self) -> None:
        self._attempts.clear()
        self.tokens = 0


STEPS = 2  # steps after which the replica's load includes a request that was on its way


@dataclass(slots=True)
class _Prompt:
    tokens: int
    is_reported: Callable[[], bool]
    sent_step: int | None = None  # the newest step here, when the other replica had received its attempt


class RemotePrompts:
    """Prompts that other replicas have a replica compute, and that its load does not include yet, by attempt id.

    The other replica receives the attempt first, which its load shows; then it requests the prompt. Two steps later
    this one's load includes it.
    """

    def __init__(self) -> None:
        self._prompts: dict[bytes, _Prompt] = {}

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def tokens(self) -> int:
        return sum(prompt.tokens for prompt in self._prompts.values())

    def add(self, attempt_id: bytes, tokens: int, is_reported: Callable[[], bool]) -> None:
        """is_reported: whether the load of the replica that will request it includes the attempt."""
        self._prompts[attempt_id] = _Prompt(tokens, is_reported)

    def discard(self, attempt_id: bytes) -> bool:
        """It is computed, or not needed any more. Returns whether it was there."""
        return self._prompts.pop(attempt_id, None) is not None

    def stepped(self, step: int) -> None:
        """This replica's load is that of this step."""
        for attempt_id, prompt in list(self._prompts.items()):
            if prompt.sent_step is None:
                prompt.sent_step = step if prompt.is_reported() else None
            elif step >= prompt.sent_step + STEPS:
                del self._prompts[attempt_id]


C = TypeVar("C")  # the owner's type of what it keeps per model: tokenizer, template


class KnownReplica(Generic[C]):
    """What the controller lists, and what the replica describes and reports of itself."""

    def __init__(self, member: Member) -> None:
        self.listing: Member | None = member  # the newest entry of the member list; None = no longer a member
        self.address = member.address
        self.identity: ReplicaIdentity = member.identity
        self.model = self.revision = ""  # until it is described
        self.defaults: Mapping[str, float] = {}  # default values of options that requests may omit
        self.facts: ModelFacts | None = None
        self.card: C | None = None
        self.load = Load()
        self.scheme: HashScheme | None = None  # hash scheme of the replica's blocks
        self.rows = self.step_tokens = 0  # see `Candidate`
        self._kv_blocks = self._block_size = 0

    def apply(self, facts: ModelFacts, card: C) -> None:
        """Applies what it reports of itself. card: what the owner made of the facts."""
        self.identity, self.facts, self.card = facts.identity, facts, card
        self.model, self.revision = facts.identity.model, facts.identity.revision
        self.defaults = default_options(facts)
        self.scheme = HashScheme.of(facts)
        self.rows, self.step_tokens = facts.max_num_seqs, facts.max_num_batched_tokens
        self._kv_blocks, self._block_size = facts.kv_blocks, facts.identity.kv_layout.block_size

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
        listed = self.listing.identity.role if self.listing is not None else None
        return listed or self.identity.role

    @property
    def is_prefill(self) -> bool:
        return self.role == ROLE_PREFILL

    @property
    def leaving(self) -> bool:
        """Whether it is drained: the end of its attempts is no failure."""
        return self.load.draining or (self.listing is not None and self.listing.state == REPLICA_STATE_DRAINING)

    @property
    def kv_tokens(self) -> float:
        """Tokens in its KV cache, as far as its facts are known."""
        return self.load.kv_usage * self._kv_blocks * self._block_size

    @property
    def free_tokens(self) -> float:
        """Tokens that its KV cache has room for; 0 = not known."""
        return self.load.free_blocks * self._block_size


_SERVING = (REPLICA_STATE_READY, REPLICA_STATE_UNHEALTHY)
CACHE_FULL = 0.9  # share of the cache's blocks from which on new blocks replace others


def _ignore() -> None:
    """Until a table follows the replica."""


class ReplicaState(KnownReplica[C]):
    """Its load, its heartbeat, and the attempts that run there.

    Ready = connected, listed by the controller, not draining, and its step counter moved within
    max(2 s, 4 x the predicted step) and the interval of its reports. A stalled replica gets no new work. That the
    controller lists it as unhealthy does not count: this router receives its steps itself.
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
        super().__init__(member)
        self._changed = True  # what policies read, since `ReplicaTable` has read it
        self._on_change: Callable[[], None] = _ignore
        self._on_frame: Callable[[], None] = _ignore
        self.connected = False
        self.attempts: dict[bytes, Attempt] = {}
        self.remote_prompts = RemotePrompts()
        self.blocks = blocks
        self.submit_queue = SubmitQueue(on_send)
        self.report_seconds = 0.0  # between two frames without tokens, as this router has requested
        self.speed = StepSpeed()
        self.arriving: set[bytes] = set()  # attempts that continue a stream and have no new tokens yet
        self._clock = clock
        self._new_id = new_id
        self.heartbeat = Heartbeat(clock)
        self._unreported = Unreported()
        self.used_at = 0.0  # when a load last showed a running request
        self.preempted_at = -inf  # when it last showed another preemption
        self._preemptions: int | None = None  # preemptions that the newest load shows

    # What policies read

    @property
    def unreported(self) -> int:
        """Attempts that were sent and that its reported load does not include yet."""
        return len(self._unreported)

    def has_reported(self, attempt_id: bytes) -> bool:
        """Whether its load includes this attempt, or did."""
        return attempt_id not in self._unreported

    @property
    def queued_tokens(self) -> int:
        """Tokens to compute before those of the next request: of its load, and of what this cannot include yet."""
        return self.load.waiting_tokens + self._unreported.tokens + self.remote_prompts.tokens

    @property
    def arrivals(self) -> int:
        """Attempts that continue a stream and have no new tokens yet."""
        return len(self.arriving)

    @property
    def stalled(self) -> bool:
        """Whether the step loop has not moved for longer than a long step would explain."""
        seconds = self.heartbeat.seconds
        return seconds > STALL_SECONDS and seconds > self.stall_seconds  # the second one takes longer

    @property
    def stall_seconds(self) -> float:
        """Without a step, until it counts as stalled."""
        return self.stall_limit(STALL_SECONDS)

    def silent(self, seconds: float) -> bool:
        """Whether the open stream has brought no step for that long: it is closed then, and opened again."""
        return self.connected and self.heartbeat.silent_seconds > self.stall_limit(seconds)

    def stall_limit(self, seconds: float) -> float:
        """Seconds without a step until it counts as stalled, at least `seconds`: frames may be a report apart."""
        return stall_limit(self.load.predicted_step_ms / 1e3, seconds) + self.report_seconds

    @property
    def requests(self) -> int:
        """Attempts of all routers that run or wait there, or were sent by this one."""
        return self.load.running + self.load.waiting + self.unreported

    @property
    def has_room(self) -> bool:
        """Whether one more attempt runs at once, as far as its rows decide."""
        return not self.rows or self.requests < self.rows

    @property
    def drops(self) -> bool:
        """Whether its cache is full: it drops a block for each new one."""
        if self.facts is None or self.blocks is None:
            return False
        return self.blocks.held >= CACHE_FULL * self._kv_blocks

    @property
    def unknown_cache(self) -> str:
        """Why it is not known which KV blocks the replica holds; empty if it is."""
        if self.blocks is None:
            return "the policy does not look for them"
        if self.scheme is None:
            return "the replica keeps no prefixes"
        if not self.blocks.complete:
            return "its events are missing"
        return "this router's index is full" if self.blocks.full else ""

    @property
    def heard(self) -> bool:
        """Whether its stream is open and its step loop moves."""
        return self.connected and not self.stalled

    @property
    def ready(self) -> bool:
        """Whether it takes new requests."""
        return self.takes_work and not self.stalled and not self.is_prefill

    @property
    def takes_work(self) -> bool:
        """Whether it is ready, if it is not stalled."""
        listed = self.listing is not None and self.listing.state in _SERVING
        return self.connected and self.facts is not None and listed and not self.load.draining

    def set_changed(self) -> None:
        """Something that policies read has changed."""
        if not self._changed:
            self._changed = True
            self._on_change()

    def reset_changed(self) -> None:
        """What policies read is about to be read."""
        self._changed = False

    def follow(self, on_change: Callable[[], None], on_frame: Callable[[], None]) -> None:
        """Sets the calls of the table that reads this replica: one table at a time.

        on_change: called now, and at the first change after each `reset_changed`. on_frame: after each frame.
        """
        self._on_change, self._on_frame = on_change, on_frame
        self._changed = False
        self.set_changed()

    # What others report or request

    def list_as(self, member: Member | None) -> None:
        """Its entry in the newest member list; None = it is no longer a member."""
        self.listing = member
        self.set_changed()

    def resume_after(self, pause: float) -> None:
        """This process was paused: the replica's frames of these seconds are not read yet."""
        self.heartbeat.extend(pause)
        self.set_changed()

    def evaluate_speed(self, peers: Sequence[StepMilliseconds]) -> None:
        """Compares its steps with those that its peers would take."""
        slow = self.speed.slow
        self.speed.evaluate(StepMilliseconds.of(self.load.step_model), peers, self.kv_tokens, self._clock())
        if self.speed.slow != slow:
            self.set_changed()

    def add_remote_prompt(self, attempt_id: bytes, tokens: int, is_reported: Callable[[], bool]) -> None:
        """Another replica will fetch a prompt that this one computes. See `RemotePrompts.add`."""
        self.remote_prompts.add(attempt_id, tokens, is_reported)
        self.set_changed()

    def discard_remote_prompt(self, attempt_id: bytes) -> None:
        """It is computed, or not needed any more."""
        if self.remote_prompts.discard(attempt_id):
            self.set_changed()

    # Attempts

    def submit(
        self,
        submit: Submit,
        on_tokens: OnTokens,
        on_end: Callable[[Attempt], None],
        cached: int = 0,
        blocks: PromptBlocks | None = None,
        prompt: Sequence[int] = (),
    ) -> Attempt:
        """Starts an attempt under a new id. The submit is sent with the next frame.

        cached: tokens of its prompt that are expected in the replica's cache. blocks: of the prompt, if they are known.
        prompt: its token ids, if they are not in `submit`: copied when it is sent.
        """

        def ended(attempt: Attempt) -> None:
            self.set_changed()
            self.attempts.pop(attempt.id, None)
            self._unreported.discard(attempt.id)
            self.arriving.discard(attempt.id)
            if self.blocks is not None:
                self.blocks.ended(attempt.id, self._clock(), computed=attempt.started)
            on_end(attempt)

        self.set_changed()
        submit.attempt_id = self._new_id()
        attempt = Attempt(
            submit.attempt_id,
            len(submit.output_token_ids),
            on_tokens,
            ended,
            self.submit_queue.cancel,
            submit.sampling.max_tokens,
        )
        self.attempts[attempt.id] = attempt
        if not self.connected:
            attempt.end(Outcome.LOST)
            return attempt
        remote = submit.HasField("source")
        length = len(submit.prompt_token_ids) + len(prompt) + len(submit.output_token_ids)
        tokens = 0 if remote else length - cached
        self._unreported.add(attempt.id, tokens)
        if submit.output_token_ids:
            self.arriving.add(attempt.id)
        if self.blocks is not None and blocks is not None:
            self.blocks.expect(attempt.id, blocks.expected)
        self.submit_queue.submit(submit, prompt)
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
        self.set_changed()
        if facts.identity.boot_id != self.identity.boot_id:
            self.load, self.speed = Load(), StepSpeed()  # an earlier process's reports are invalid
        self.apply(facts, card)
        if self.blocks is not None and self.scheme is not None and self.scheme.states:
            self.blocks.state_group = len(self.scheme.windows) - 1

    def receive(self, frame: ReplicaFrame) -> bool:
        """Processes one frame of the replica. Returns whether its step counter moved."""
        moved = self._receive(frame)
        self._on_frame()
        return moved

    def _receive(self, frame: ReplicaFrame) -> bool:
        self.set_changed()
        if frame.HasField("hello"):
            self.heartbeat.opened(frame.hello.boot_id, frame.step, stalled=self.stalled)
            self.identity, self.connected = frame.hello, True
            self.speed.restart()
        if frame.HasField("load"):
            self.load = frame.load
            before, self._preemptions = self._preemptions, self.load.counters.preemptions
            if before is not None and self._preemptions > before:
                self.preempted_at = self._clock()
            if frame.load.running:
                self.used_at = self._clock()
        if frame.HasField("submits"):
            for attempt_id in self.submit_queue.take_reported(frame.submits):
                self._unreported.discard(attempt_id)
        for delta in frame.deltas:
            attempt = self.attempts.get(delta.attempt_id)
            if attempt is not None:
                attempt.receive(delta)
        if not self.heartbeat.stepped(frame.step):
            return False
        self.speed.add(frame.step, self.load, self._clock())
        self.remote_prompts.stepped(frame.step)
        return True

    def disconnect(self) -> None:
        """The stream has ended, and with it every attempt on it."""
        self.connected = False
        self.set_changed()
        self._unreported.clear()
        self.end_attempts()
        self.submit_queue.clear()

"""A router: production fleet, policies, rebalancer and choice runs, and clients that check every token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from random import Random
from typing import TYPE_CHECKING

from headrace_proto import control_pb2 as control
from headrace_proto import replica_pb2 as pb
from headrace_router.core.attempt import Attempt, Outcome
from headrace_router.core.choice_request import ChoiceRequest
from headrace_router.core.choice_run import ChoiceRun
from headrace_router.core.errors import ApiError, DeadlineError
from headrace_router.core.fleet import Fleet
from headrace_router.core.policy import LeastLoad
from headrace_router.core.policy.disaggregate import LEAST_TOKENS
from headrace_router.core.quarantine import Quarantine
from headrace_router.core.replica_state import ReplicaState
from headrace_router.core.retry import RetryState
from support.simulation.router_stream import RouterStream
from support.simulation.sim_model import BLOCK, MAX_MODEL_LEN, expected_answer
from support.simulation.world import InvariantViolation, World

if TYPE_CHECKING:
    from support.simulation.sim_cluster import Cluster

MAINTENANCE_SECONDS = 0.1  # between two checks of all replicas
RECONNECT_SECONDS = 0.1
LINK_SECONDS = 30.0  # the default of `stall_seconds`: without steps, until a link is closed


class Phase(Enum):
    """The phase of a request in which its client disconnects."""

    QUEUED = "queued"
    REQUESTED = "requested"
    GRANTED = "granted"
    MOVING = "moving"
    COMMITTED = "committed"
    PREFILL = "prefill"
    FIRST_TOKEN = "first token"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """A client's request, and the phase in which the client disconnects."""

    number: int
    arrival: float
    prompt: list[int]
    max_tokens: int
    salt: bytes
    priority: int
    deadline: float | None
    disconnects_in: Phase | None
    pinned: str = ""  # the replica that it is placed on, if that is ready


State = ReplicaState[None]  # of the one model, "m" in revision "r"


class SimTimer:
    """One scheduled call that may be cancelled."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self._call = None

    def fire(self) -> None:
        if self._call is not None:
            self._call()


class SimTimers:
    """Timers of the simulated world."""

    def __init__(self, world: World) -> None:
        self._world = world

    def now(self) -> float:
        return self._world.now

    def soon(self, call: Callable[[], None]) -> Callable[[], None]:
        return self.after(0.0, call)

    def after(self, seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        timer = SimTimer(call)
        self._world.at(seconds, timer.fire)
        return timer.cancel


class SimRequest:
    """One client: the output and the listener of its choice run."""

    def __init__(self, router: "SimRouter", spec: ClientRequest) -> None:
        self.spec = spec
        self.outcome = ""
        self.tokens: list[int] = []
        self.failure: Exception | None = None
        self.error: ApiError | None = None  # that the client receives
        self.placements: list[tuple[float, str]] = []  # times and names of replicas
        self.token_times: list[float] = []
        self.ended_at: float | None = None
        self._router = router
        self._world = router.world
        self._finish = ""
        self._expected = expected_answer(spec.prompt, spec.max_tokens)
        self.run: ChoiceRun[None] = ChoiceRun(
            ChoiceRequest(
                label=str(spec.number),
                model="m",
                revision="r",
                tenant_salt=spec.salt,
                prompt_token_ids=spec.prompt,
                sampling=pb.Sampling(max_tokens=spec.max_tokens, ignore_eos=True),
                priority=spec.priority,
                deadline_seconds=spec.deadline,
            ),
            self,
            SimPlacement(router, spec.pinned),
            RetryState("m", max_attempts=3, migration_limit=3, patience=5.0, jitter=router.jitter),
            SimTimers(router.world),
            self,
        )

    @property
    def attempt(self) -> Attempt | None:
        return self.run.attempt

    @property
    def replica_name(self) -> str:
        """The replica's name."""
        return self.run.replica.replica_id if self.run.replica is not None else ""

    def disconnect(self) -> None:
        """The client closes its connection."""
        if not self.outcome:
            self.run.cancel()
            self._end("disconnected")

    def move(self) -> bool:
        """Moves a stream to another replica, as the rebalancer does. Returns whether there was one to move."""
        attempt = self.attempt
        if self.outcome or attempt is None or not (attempt.open and attempt.started):
            return False
        attempt.move()
        self._router.moved += 1
        return True

    # Output

    @property
    def output_token_ids(self) -> Sequence[int]:
        return self.tokens

    @property
    def done(self) -> bool:
        return bool(self._finish)

    # RunListener

    def placed(self, replica_id: str) -> None:
        self.placements.append((self._world.now, replica_id))
        if self._world.tracing:
            self._world.log(f"request {self.spec.number} to {replica_id}, {len(self.tokens)} sent")

    def add_tokens(
        self, attempt: Attempt, token_ids: Sequence[int], logprobs: Sequence[pb.TokenLogprobs], finish: int, error: str
    ) -> None:
        first = len(self.tokens)
        self.tokens += token_ids
        self.token_times += [self._world.now] * len(token_ids)
        if self.outcome or self._finish:
            raise InvariantViolation(f"request {self.spec.number} has ended and receives tokens")
        if self.tokens != self._expected[: len(self.tokens)]:
            raise InvariantViolation(
                f"request {self.spec.number} got {list(token_ids)} from token {first} on, not {self._expected[first:]}"
            )
        if finish == pb.FINISH_LENGTH and len(self.tokens) != len(self._expected):
            raise InvariantViolation(f"request {self.spec.number} ends after {len(self.tokens)} tokens")
        if finish != pb.FINISH_NONE:
            self._finish = pb.FinishReason.Name(finish)
        elif (self.tokens and self.spec.disconnects_in is Phase.FIRST_TOKEN) or (
            len(self.tokens) > 2 and self.spec.disconnects_in is Phase.DECODE
        ):
            self.disconnect()

    def left(self, replica_id: str, outcome: Outcome, begun: bool) -> None:
        if self._world.tracing:
            self._world.log(f"request {self.spec.number} leaves {replica_id}: {outcome.value}")

    def ended(self, attempt: Attempt | None, failure: Exception | None) -> None:
        if failure is not None and not isinstance(failure, ApiError):
            raise failure
        self.error = failure
        if failure is None:
            self._end(self._finish)
        else:
            self._end("deadline" if isinstance(failure, DeadlineError) else type(failure).__name__)

    def _end(self, outcome: str) -> None:
        if self.outcome:
            raise InvariantViolation(f"request {self.spec.number} ends twice: {self.outcome}, {outcome}")
        if self._world.tracing:
            self._world.log(f"request {self.spec.number} ends: {outcome}")
        self.outcome, self.ended_at = outcome, self._world.now


@dataclass(frozen=True, slots=True)
class SimPlacement:
    """Production's placement; sometimes with a source that production would not choose."""

    router: "SimRouter"
    pinned: str  # the replica that the request is placed on, if that is ready

    @property
    def quarantine(self) -> Quarantine:
        return self.router.fleet.quarantine

    def place(
        self,
        request: ChoiceRequest,
        output_tokens: int,
        excluded: Sequence[State],
        *,
        preferred: object = None,
        alone: bool = False,
        urgent: bool = False,
    ) -> State | None:
        if self.pinned and not alone:
            for state in self.router.fleet.replicas:
                if state.replica_id == self.pinned and state.ready and state not in excluded:
                    return state
        return self.router.fleet.place(
            request, output_tokens, excluded, preferred=preferred, alone=alone, urgent=urgent
        )

    def prefill_source(self, target: State, request: ChoiceRequest, output_tokens: int) -> State | None:
        """Any other replica, reachable or not; rarely the target itself."""
        world = self.router.world
        if not self.pinned and world.chance(self.router.source_share):
            states = [state for state in self.router.fleet.replicas if state is not target or world.chance(0.02)]
            return world.random.choice(states) if states else None
        if self.pinned:
            return None
        source = self.router.fleet.prefill_source(target, request, output_tokens)
        self.router.sources_chosen += source is not None
        return source

    def sweep(self) -> None:
        self.router.fleet.sweep()


class SimLink:
    """Keeps a stream open to one build of a replica, as the production link does over gRPC."""

    def __init__(self, router: "SimRouter", member: control.Member) -> None:
        world = router.world
        self.state: State = ReplicaState(
            member, clock=world.clock, new_id=lambda: world.random.randbytes(16), on_send=self._send
        )
        self.stream: RouterStream | None = None
        self._router = router
        self._closed = False
        router.links.append(self)
        self._connect()

    def close(self) -> None:
        self._closed = True
        self._router.links.remove(self)
        if self.stream is not None:
            self.stream.disconnect()

    def check_stall(self) -> None:
        """A stream without steps for longer is closed, as the production link's read times out."""
        state = self.state
        if self.stream is not None and state.connected and state.seconds_since_step > state.stall_limit(LINK_SECONDS):
            self.stream.disconnect()

    def received(self, frame: pb.ReplicaFrame) -> None:
        if frame.HasField("hello"):
            self.state.describe(pb.ModelFacts(identity=frame.hello, max_model_len=MAX_MODEL_LEN), None)
        self.state.receive(frame)

    def disconnected(self) -> None:
        """All attempts on it are lost; it is opened again after a delay."""
        self.stream = None
        self.state.disconnect()
        if not self._closed:
            self._router.world.at(RECONNECT_SECONDS, self._connect)

    def _connect(self) -> None:
        if self._closed or self.stream is not None:
            return
        replica = self._router.cluster.build(self.state.replica_id, self.state.identity.generation)
        if replica is None or replica.stopped or replica.frozen_until > self._router.world.now:
            if self._router.busy and (replica is not None or self.state.listing is not None):
                self._router.world.at(RECONNECT_SECONDS, self._connect)
            return
        self.stream = RouterStream(self, replica)
        self._send()

    def _send(self) -> None:
        stream = self.stream
        while stream is not None and (frame := self.state.submit_queue.take()) is not None:
            stream.send(frame)


class SimRouter:
    """Has a link to every build of a replica on its member list."""

    def __init__(self, cluster: "Cluster", source_share: float) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.requests: list[SimRequest] = []
        self.links: list[SimLink] = []
        self.moved = 0  # streams that `SimRequest.move` moved
        self.sources_chosen = 0  # by production's policy
        self.stalled = 0  # attempts that production's maintenance ended on stalled replicas
        self.source_share = source_share
        self.jitter = Random(self.world.seed).random  # of its own: the schedule's draws stay the same
        self.fleet: Fleet[None] = Fleet(
            self._open,
            LeastLoad(),
            0,
            clock=self.world.clock,
            jitter=self.jitter,
            disaggregation="always" if source_share and self.world.seed % 2 else "auto",
            least_disaggregated=2 * BLOCK if source_share else LEAST_TOKENS,  # the prompts of schedules are short
        )
        self._maintaining = False

    @property
    def streams(self) -> list[RouterStream]:
        return [link.stream for link in self.links if link.stream is not None]

    @property
    def busy(self) -> bool:
        """Whether any client waits for an answer, or any request is still to come."""
        return self.cluster.requests_to_come > 0 or any(not request.outcome for request in self.requests)

    def begin(self) -> None:
        """Starts the production server's maintenance, which runs while there are clients."""
        if not self._maintaining:
            self._maintaining = True
            self._maintain()

    def arrive(self, spec: ClientRequest) -> None:
        request = SimRequest(self, spec)
        self.requests.append(request)
        self.begin()
        request.run.begin()

    def update(self, members: control.MemberList) -> None:
        self.fleet.update(members)

    def _maintain(self) -> None:
        for link in list(self.links):
            link.check_stall()
        held = {id(attempt) for state in self.fleet.replicas if state.stalled for attempt in state.attempts.values()}
        self.fleet.maintain()
        left = {id(attempt) for state in self.fleet.replicas for attempt in state.attempts.values()}
        self.stalled += len(held - left)
        self.fleet.rebalance(self.world.now)
        if self.busy:
            self.world.at(MAINTENANCE_SECONDS, self._maintain)
        else:
            self._maintaining = False

    def _open(self, member: control.Member) -> SimLink:
        return SimLink(self, member)

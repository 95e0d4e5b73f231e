"""A client that checks every token, the placement of its choice run, and the timers of its router."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Any

from headrace_proto import replica_pb2 as pb
from headrace_router.core.attempt import Attempt, Outcome
from headrace_router.core.choice_run import ChoiceRun
from headrace_router.core.errors import ApiError, DeadlineError
from headrace_router.core.placement import KvSource, Placed
from headrace_router.core.policy.interface import ChoiceRequest
from headrace_router.core.replica_state import ReplicaState
from headrace_router.core.retry import RetryState
from support.simulation.sim_model import expected_answer
from support.simulation.world import InvariantViolation

if TYPE_CHECKING:
    from support.simulation.sim_router import SimRouter

State = ReplicaState[str]  # of the one model, "m"; the card is its revision


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


class SimTimers:
    """On the clock of their router; lost when it is killed."""

    def __init__(self, router: "SimRouter") -> None:
        self._router = router

    def now(self) -> float:
        return self._router.clock()

    def soon(self, call: Callable[[], None]) -> Callable[[], None]:
        return self.after(0.0, call)

    def after(self, seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        waiting = [call]

        def fire() -> None:
            for each in waiting:
                each()

        self._router.world.at(seconds / self._router.rate, fire, self._router)
        return waiting.clear


class SimRequest:
    """One client: the output and the listener of its choice run."""

    def __init__(self, router: "SimRouter", spec: ClientRequest, revision: str = "r") -> None:
        self.spec = spec
        self.revision = revision
        self.outcome = ""
        self.tokens: list[int] = []
        self.failure: Exception | None = None  # of the text, which has none here
        self.error: ApiError | None = None  # that the client receives
        self.placements: list[tuple[float, str]] = []  # times and names of replicas
        self.token_times: list[float] = []
        self.ended_at: float | None = None
        self._router = router
        self._world = router.world
        self._finish = ""
        self._expected = expected_answer(spec.prompt, spec.max_tokens)
        self.run: ChoiceRun[str] = ChoiceRun(
            ChoiceRequest(
                label=str(spec.number),
                model="m",
                revision=revision,
                tenant_salt=spec.salt,
                prompt_token_ids=spec.prompt,
                sampling=pb.Sampling(max_tokens=spec.max_tokens, ignore_eos=True),
                priority=spec.priority,
                deadline_seconds=spec.deadline,
            ),
            self,
            SimPlacement(router, spec.pinned),
            RetryState("m", max_attempts=3, migration_limit=3, patience=router.patience, jitter=router.jitter),
            SimTimers(router),
            (self,),
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

    def connection_lost(self) -> None:
        """The router's process ended, and the client's connection with it."""
        self.run.cancel()
        self._end("connection lost")

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

    def placed(self, placed: Placed[Any]) -> None:
        replica_id = placed.replica.replica_id
        self.placements.append((self._world.now, replica_id))
        self._world.log("request {} to {}, {} sent", self.spec.number, replica_id, len(self.tokens))

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
        self._world.log("request {} leaves {}: {}", self.spec.number, replica_id, outcome.value)

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
        self._world.log("request {} ends: {}", self.spec.number, outcome)
        self.outcome, self.ended_at = outcome, self._world.now


@dataclass(frozen=True, slots=True)
class SimPlacement:
    """Production's placement; sometimes with a source that production would not choose."""

    router: "SimRouter"
    pinned: str  # the replica that the request is placed on, if that is ready

    def place(
        self,
        request: ChoiceRequest,
        output_tokens: int,
        excluded: Sequence[State],
        *,
        preferred: object = None,
        urgent: bool = False,
        sources: bool = True,
    ) -> Placed[str] | None:
        if self.pinned:
            for state in self.router.fleet.replicas:
                if state.replica_id == self.pinned and state.ready and state not in excluded:
                    return Placed(state)
        chosen = self.router.placement.place(
            request, output_tokens, excluded, preferred=preferred, urgent=urgent, sources=sources
        )
        if chosen is None:
            return None
        self.router.placed(chosen.replica)
        return replace(chosen, source=self._source(chosen)) if sources else chosen

    def _source(self, chosen: Placed[str]) -> KvSource[str] | None:
        """Sometimes any other replica, reachable or not; rarely the target itself."""
        world, target = self.router.world, chosen.replica
        if self.pinned:
            return None
        if world.chance(self.router.source_share):
            states = [state for state in self.router.fleet.replicas if state is not target or world.chance(0.02)]
            return KvSource(world.random.choice(states), cached_only=False) if states else None
        self.router.sources_chosen += chosen.source is not None
        return chosen.source

    def finished(self, request: ChoiceRequest, output_tokens: int) -> None:
        self.router.placement.finished(request, output_tokens)

    def sweep(self) -> None:
        self.router.fleet.sweep()

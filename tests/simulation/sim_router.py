"""A router: production journeys and attempts, and a client per request who checks every token."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from router_stream import RouterStream
from sim_model import answer
from world import BrokenPromise

from headrace_proto import replica_pb2 as pb
from headrace_router.attempt import Attempt, Outcome
from headrace_router.errors import ApiError
from headrace_router.journey import Journey, Loss

if TYPE_CHECKING:
    from sim_cluster import Cluster

LOOK_SECONDS = 0.1
GONE_SECONDS = 0.7  # from an attempt's being called off until nothing is left of it


class Phase(Enum):
    """Where a request is when its client leaves."""

    QUEUED = "queued"
    ASKED = "asked"
    GRANTED = "granted"
    MOVING = "moving"
    COMMITTED = "committed"
    PREFILL = "prefill"
    FIRST_TOKEN = "first token"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class Wish:
    """What a client asks for, and how long he stays."""

    number: int
    arrival: float
    prompt: list[int]
    max_tokens: int
    salt: bytes
    priority: int
    deadline: float | None
    leaves: Phase | None
    place: str = ""  # the replica that is to have it, if it is ready


class SimRequest:
    """One wish on its way, as `generation.py` runs a choice."""

    def __init__(self, router: "SimRouter", wish: Wish, journey: Journey[str]) -> None:
        self.wish = wish
        self.outcome = ""
        self.tokens: list[int] = []
        self.attempt: Attempt | None = None
        self.at = ""  # the replica's name
        self._router = router
        self._world = router.world
        self._journey = journey
        self._expected = answer(wish.prompt, wish.max_tokens)
        self._stream: RouterStream | None = None
        self._left = ""
        self._kept: tuple[Attempt, RouterStream] | None = None  # moved, and not called off where it came from
        self._looking = False
        if wish.deadline is not None:
            self._world.at(wish.deadline, lambda: self.leave("deadline"))

    def place(self) -> None:
        """Finds a replica, or waits for one."""
        self._looking = False
        if self.outcome:
            return
        begun = bool(self.tokens)
        stream = self._router.choose(self._journey.excluded, self.wish.place)
        if stream is None:
            self._release()
            try:
                self._journey.nowhere(begun, self._world.now)
            except ApiError as error:
                self._end(type(error).__name__)
                return
            self._looking = True
            self._world.at(LOOK_SECONDS, self.place)
            return
        self._journey.placed()
        self._stream, self.at = stream, stream.replica.name
        attempt_id = self._world.random.randbytes(16)
        self.attempt = Attempt(attempt_id, len(self.tokens), self._on_tokens, stream.cancel)
        submit = pb.Submit(
            attempt_id=attempt_id,
            tenant_salt=self.wish.salt,
            prompt_token_ids=self.wish.prompt,
            output_token_ids=self.tokens,
            sampling=pb.Sampling(max_tokens=self.wish.max_tokens, ignore_eos=True),
            priority=self.wish.priority,
        )
        if self.wish.deadline is not None:
            left = self.wish.arrival + self.wish.deadline - self._world.now
            submit.deadline_ms = max(1, int(left * 1000))
        holder = self._left if self._left and self._left != self.at and self._router.is_connected(self._left) else ""
        source = holder or ("" if self.wish.place else self._router.choose_source(self.at))
        if source:
            submit.source.CopyFrom(pb.Source(replica_id=source, address=source, cached_only=bool(holder)))
        if self._world.tracing:
            self._world.log(f"request {self.wish.number} to {self.at}, source {source or '-'}, {len(self.tokens)} out")
        stream.submit(submit)

    def leave(self, outcome: str) -> None:
        """Nobody waits any more."""
        if self.outcome:
            return
        attempt, stream = self.attempt, self._stream
        if attempt is not None and stream is not None:
            self._world.at(GONE_SECONDS, lambda: self._look_back(attempt.id, stream))
            attempt.cancel()
        self._end(outcome)
        self._release()

    def move(self) -> bool:
        """Has a stream go on elsewhere, its blocks kept where it was until it has; whether there is one to move."""
        attempt, stream = self.attempt, self._stream
        if self.outcome or attempt is None or stream is None or not (attempt.open and attempt.started):
            return False
        attempt.move()
        self._release()
        self._kept = attempt, stream
        self._router.moved += 1
        self.look()
        return True

    def _release(self) -> None:
        """Whoever keeps blocks for this request need not any more."""
        if self._kept is not None:
            (attempt, stream), self._kept = self._kept, None
            attempt.release()
            self._world.at(GONE_SECONDS, lambda: self._look_back(attempt.id, stream))

    def _look_back(self, attempt_id: bytes, stream: RouterStream) -> None:
        """Whoever left or moved is forgotten by now, unless the word of it could not get through."""
        if stream.undisturbed and attempt_id in stream.replica.engine._requests:
            raise BrokenPromise(f"{stream.replica.name} still serves request {self.wish.number}, which was called off")

    def heard(self, delta: pb.Delta) -> None:
        if self.attempt is not None:
            self.attempt.receive(delta)
            self.look()

    def lost(self) -> None:
        """The stream that carried the attempt is gone."""
        if self.attempt is not None:
            self.attempt.end(Outcome.LOST)
            self.look()

    def look(self) -> None:
        """Whether the attempt is over, and what comes then."""
        attempt = self.attempt
        if attempt is None or not attempt.outcome.done() or self.outcome or self._looking:
            return
        outcome = attempt.outcome.result()
        if outcome is Outcome.FINISHED:
            raise BrokenPromise("an attempt is finished, its request is not")
        self.attempt = None
        begun = bool(self.tokens)
        if outcome is Outcome.MOVED:
            self._left = self.at
            self._journey.moved(self.at)
            self.place()
            return
        self._release()
        loss = Loss.REFUSED if outcome is Outcome.REFUSED else Loss.LOST
        self._left = self.at if begun and loss is Loss.LOST else ""
        try:
            self._journey.ended(self.at, loss, begun)
        except ApiError as error:
            self._end(type(error).__name__)
            return
        self.place()

    def _on_tokens(
        self, token_ids: Sequence[int], logprobs: Sequence[pb.TokenLogprobs], finish: int, error: str
    ) -> None:
        first = len(self.tokens)
        self._release()
        self.tokens += token_ids
        if self.outcome:
            raise BrokenPromise(f"request {self.wish.number} has ended and gets tokens")
        if self.tokens != self._expected[: len(self.tokens)]:
            raise BrokenPromise(
                f"request {self.wish.number} got {list(token_ids)} from token {first} on, not {self._expected[first:]}"
            )
        if finish == pb.FINISH_LENGTH and len(self.tokens) != len(self._expected):
            raise BrokenPromise(f"request {self.wish.number} ends after {len(self.tokens)} tokens")
        if finish != pb.FINISH_NONE:
            self._end(pb.FinishReason.Name(finish))
        if (self.tokens and self.wish.leaves is Phase.FIRST_TOKEN) or (
            len(self.tokens) > 2 and self.wish.leaves is Phase.DECODE
        ):
            self.leave("left")

    def _end(self, outcome: str) -> None:
        if self.outcome:
            raise BrokenPromise(f"request {self.wish.number} ends twice: {self.outcome}, {outcome}")
        if self._world.tracing:
            self._world.log(f"request {self.wish.number} ends: {outcome}")
        self.outcome = outcome


class SimRouter:
    """Has a stream to every replica that can be reached."""

    def __init__(self, cluster: "Cluster", source_share: float) -> None:
        self.cluster = cluster
        self.world = cluster.world
        self.requests: list[SimRequest] = []
        self.streams: dict[str, RouterStream] = {}
        self.moved = 0  # times that a stream was
        self._source_share = source_share

    def arrive(self, wish: Wish) -> None:
        journey: Journey[str] = Journey("m", max_attempts=3, migration_limit=3, patience=5.0)
        request = SimRequest(self, wish, journey)
        self.requests.append(request)
        request.place()

    def connect(self, name: str) -> None:
        """Opens a stream to the replica's present life, or tries again in a moment."""
        replica = self.cluster.at(name)
        if name in self.streams:
            return
        if replica is None or replica.stopped or replica.frozen_until > self.world.now:
            if replica is None or self.cluster.keeps(name):
                self.world.at(0.1, lambda: self.connect(name)) if self.busy else None
            return
        self.streams[name] = RouterStream(self, replica)

    @property
    def busy(self) -> bool:
        """Whether anybody waits for an answer, or will."""
        return self.cluster.wishes_to_come > 0 or any(not request.outcome for request in self.requests)

    def choose(self, excluded: list[str], wanted: str) -> RouterStream | None:
        ready = [
            stream
            for name, stream in self.streams.items()
            if name not in excluded and not stream.replica.draining and self.cluster.decodes(name)
        ]
        first = [stream for stream in ready if stream.replica.name == wanted]
        return self.world.random.choice(first or ready) if ready else None

    def choose_source(self, target: str) -> str:
        """Any other replica by its address, whether or not it is there; now and then the target itself."""
        if not self.world.chance(self._source_share):
            return ""
        others = [name for name in self.cluster.names if name != target or self.world.chance(0.02)]
        return self.world.random.choice(others) if others else ""

    def is_connected(self, name: str) -> bool:
        return name in self.streams

    def heard(self, stream: RouterStream, deltas: list[pb.Delta]) -> None:
        for delta in deltas:
            for request in self.requests:
                if request.attempt is not None and request.attempt.id == delta.attempt_id:
                    request.heard(delta)

    def disconnected(self, stream: RouterStream) -> None:
        """All attempts on it are lost; it is opened again after a while."""
        name = stream.replica.name
        if self.streams.get(name) is stream:
            del self.streams[name]
            self.world.at(0.1, lambda: self.connect(name))
        for request in self.requests:
            if request.at == name and request.attempt is not None and not request.outcome:
                request.lost()

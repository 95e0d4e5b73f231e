"""State of one replica in the controller, and the actions on it: plain data of the reconciler."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.spec.model_spec import ModelSpec
from headrace_proto.role import Role

FAILURE_WINDOW_SECONDS = 300.0
CRASH_LOOP_FAILURES = 3
BACKOFF_LIMIT_SECONDS = 60.0


class State(StrEnum):
    """State of a replica, as `headrace status` prints it."""

    PENDING = "pending"  # it waits for a place: for free GPUs and CPUs, or for nodes that come
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    UNHEALTHY = "unhealthy"
    DEAD = "dead"
    DRAINED = "drained"  # ended on demand, and not built again until an operator asks


UP = (State.READY, State.UNHEALTHY)  # its build runs, and is not to end


@dataclass(frozen=True, slots=True)
class DesiredReplica:
    """One replica of the spec. The model's tp and pp are those of this replica."""

    replica_id: str
    model: ModelSpec
    role: Role = Role.BOTH


@dataclass(frozen=True, slots=True)
class Launch:
    """Build this generation of a replica."""

    name: ReplicaName
    model: ModelSpec
    role: Role
    beside: bool = False  # the previous build is up and stays up until this one has taken over


@dataclass(frozen=True, slots=True)
class Stop:
    """End this generation; with `drain`, requests in flight may finish first."""

    name: ReplicaName
    drain: bool
    held: bool = False  # an operator drains it: it stays down


Action = Launch | Stop


@dataclass(slots=True)
class Record:
    """One replica id and its newest build. Times are seconds of the caller's clock."""

    replica_id: str
    model: ModelSpec
    role: Role = Role.BOTH
    generation: int = 0
    state: State = State.DEAD
    since: float = 0.0  # of the state
    up_since: float = 0.0  # of its build, that it was ready or unhealthy for the first time
    last_health: float = 0.0  # last health message
    silence_limit: float = 0.0  # seconds without a health message until it is unhealthy
    ever_ready: bool = False
    failures: list[float] = field(default_factory=list)
    not_before: float = 0.0  # of the next build
    cause: str = ""  # of the last failure
    held: bool = False  # an operator drained it
    rolling: bool = False  # it is ended, then built again
    outdated: bool = False  # its build was adopted, and the spec describes another one now
    role_number: int = 0  # of the decision about its role: its rank ignores an earlier one that arrives late
    built: int = 0  # generation of the newest build of this replica: this record's or one beside it
    connected: float | None = None  # time since which every router is connected to it
    started: bool = False  # its start has returned: health messages are due
    silent: bool = False  # of an earlier controller, perhaps up: its ranks have not replied yet

    @property
    def name(self) -> ReplicaName:
        return ReplicaName(self.replica_id, self.generation)

    @property
    def running(self) -> bool:
        """Whether it has a build that is not being stopped."""
        return self.state in (State.PENDING, State.STARTING, State.READY, State.UNHEALTHY)

    @property
    def down(self) -> bool:
        """Whether it has no build."""
        return self.state in (State.DEAD, State.DRAINED)

    @property
    def answers(self) -> bool:
        """Whether every router places requests there now and will continue to."""
        return self.stays and self.connected is not None

    @property
    def stays(self) -> bool:
        """Whether it is ready to decode and is not to end; routers may not be connected to it yet."""
        return self.state is State.READY and self.role.decodes and not (self.held or self.rolling)

    def fail(self, cause: str, now: float) -> None:
        """Its build has ended, or did not become ready; the next one follows at once, later after pauses."""
        self.failures = [when for when in self.failures if now - when <= FAILURE_WINDOW_SECONDS] + [now]
        tries = len(self.failures)
        self.not_before = now + (0.0 if tries == 1 else min(BACKOFF_LIMIT_SECONDS, 2.0 ** (tries - 2)))
        self.cause = cause
        self.enter(State.DEAD, now)

    def crash_loop(self, now: float) -> str:
        """A sentence for status when it fails repeatedly; else empty."""
        recent = [when for when in self.failures if now - when <= FAILURE_WINDOW_SECONDS]
        if len(recent) < CRASH_LOOP_FAILURES:
            return ""
        wait = max(0.0, self.not_before - now)
        return (
            f"crash loop: failed {len(recent)} times in {FAILURE_WINDOW_SECONDS / 60:.0f} minutes; "
            f"last: {self.cause or 'unknown'}" + (f"; next try in {wait:.0f} s" if wait else "")
        )

    def enter(self, state: State, now: float) -> None:
        """Changes the state; `since` is kept if the state is the same."""
        if self.state is not state:
            if state in UP and self.state not in UP:
                self.up_since = now
            self.state, self.since = state, now


def another_answers(records: Mapping[str, Record], record: Record) -> bool:
    """Whether requests for the model can go to another replica."""
    return any(other.answers for other in peers(records, record))


def unconnected_peer(records: Mapping[str, Record], record: Record) -> str:
    """A sentence if another replica can take the requests as soon as routers are connected to it; else empty."""
    others = peers(records, record)
    peer = next((other for other in others if other.stays), None)
    if peer is None or any(other.answers for other in others):
        return ""
    return f"not every router is connected to {peer.replica_id} yet; try again in a few seconds"


def peers(records: Mapping[str, Record], record: Record) -> list[Record]:
    """Other replicas of its model."""
    return [other for other in records.values() if other is not record and other.model.name == record.model.name]

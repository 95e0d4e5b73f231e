"""What to do next, as a pure function of what was seen: no Ray, no clock, no sockets.

    spec ── desired ──▶ ┌────────────┐ ── actions(now) ──▶ Launch / Stop
    events of replicas ▶ │ Reconciler │
                         └────────────┘ ── records ──▶ status, member list

An event carries the generation it is about, so that the last words of an old build never touch the new one.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum

from headrace_cluster.naming import ReplicaName, replica_id
from headrace_cluster.pools import Role
from headrace_cluster.spec import ClusterSpec, HealthSpec, ModelSpec

STALL_STEPS = 4.0  # predicted steps without a word until a replica counts as unhealthy, where that is the longer time
FAILURE_WINDOW_SECONDS = 300.0
CRASH_LOOP_FAILURES = 3
BACKOFF_LIMIT_SECONDS = 60.0
START_TRIES = 3  # of a replica that never was ready, when it dies without saying why


class State(StrEnum):
    """Of a replica, as `headrace status` prints it."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    UNHEALTHY = "unhealthy"
    DEAD = "dead"
    DRAINED = "drained"  # ended on demand, and not built again until somebody asks


@dataclass(frozen=True, slots=True)
class DesiredReplica:
    """One replica that the spec asks for. The model's tp and pp are this replica's."""

    replica_id: str
    model: ModelSpec
    role: Role = Role.BOTH


@dataclass(frozen=True, slots=True)
class Launch:
    """Build this generation of a replica."""

    name: ReplicaName
    model: ModelSpec
    role: Role


@dataclass(frozen=True, slots=True)
class Stop:
    """End this generation; with `drain`, requests in flight may finish first."""

    name: ReplicaName
    drain: bool


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
    heard: float = 0.0  # last health message
    silence: float = 0.0  # seconds that it may be silent
    ever_ready: bool = False
    failures: list[float] = field(default_factory=list)
    not_before: float = 0.0  # of the next build
    cause: str = ""  # of the last failure
    held: bool = False  # somebody wants it down

    @property
    def name(self) -> ReplicaName:
        return ReplicaName(self.replica_id, self.generation)

    @property
    def running(self) -> bool:
        """Whether a build of it exists that was not told to stop."""
        return self.state in (State.STARTING, State.READY, State.UNHEALTHY)

    @property
    def down(self) -> bool:
        """Whether no build of it is left."""
        return self.state in (State.DEAD, State.DRAINED)

    @property
    def answers(self) -> bool:
        """Whether routers place requests there, now and in the next moment."""
        return self.state is State.READY and not self.held and self.role.decodes


def desired_replicas(spec: ClusterSpec) -> list[DesiredReplica]:
    """What the spec asks for. Ids are unique even where two models end alike; roles change, so no id has one."""
    found: list[DesiredReplica] = []
    taken: dict[str, int] = {}
    for model in spec.models:
        prefix = replica_id(model.name, 0).removesuffix("-0")
        for pool in model.pools:
            first = taken.get(prefix, 0)
            ids = (replica_id(model.name, first + index) for index in range(pool.replicas))
            found += [DesiredReplica(found_id, model.shaped(pool), pool.role) for found_id in ids]
            taken[prefix] = first + pool.replicas
    return found


class Reconciler:
    """Decides which replicas to build and which to end. Single-threaded; the caller passes the time."""

    def __init__(self, desired: Iterable[DesiredReplica], health: HealthSpec) -> None:
        self._health = health
        self.records: dict[str, Record] = {}
        self.fatal = ""  # why the cluster cannot start at all; empty while it can
        self.set_desired(desired)

    def set_desired(self, desired: Iterable[DesiredReplica]) -> None:
        """Changes what is wanted; the next `actions` bring it about."""
        self._desired = {entry.replica_id: entry for entry in desired}
        for entry in self._desired.values():
            self.records.setdefault(entry.replica_id, Record(entry.replica_id, entry.model, entry.role))

    @property
    def ready(self) -> bool:
        """Whether every wanted replica is ready; those that somebody wants down are not missing."""
        wanted = (self.records[entry] for entry in self._desired)
        return all(record.state is State.READY for record in wanted if not record.held)

    @property
    def desired(self) -> list[DesiredReplica]:
        """What is wanted now."""
        return list(self._desired.values())

    @property
    def idle(self) -> bool:
        """Whether no build of any replica is left."""
        return all(record.down for record in self.records.values())

    def hold(self, replica_id: str) -> None:
        """The replica is to be drained and to stay down."""
        self.records[replica_id].held = True

    def release(self, replica_id: str) -> None:
        """The replica is wanted again: it is built at once, or as soon as it is drained."""
        record = self.records[replica_id]
        record.held, record.cause, record.failures, record.not_before = False, "", [], 0.0
        if record.state is State.DRAINED:
            record.state = State.DEAD

    def adopted(self, name: ReplicaName, now: float) -> None:
        """A build of an earlier controller is up, and goes on as the newest of its replica."""
        record = self.records[name.replica_id]
        record.generation, record.ever_ready = name.generation, True
        record.heard, record.silence = now, self._health.silence_seconds
        self._enter(record, State.READY, now)

    # -- events -----------------------------------------------------------------------------------------------

    def heard(self, name: ReplicaName, state: State, step_seconds: float, now: float) -> None:
        """A health message: the step loop lives. `step_seconds` is the predicted length of its next step."""
        record = self._current(name)
        if record is None:
            return
        record.heard = now
        record.silence = max(self._health.silence_seconds, STALL_STEPS * step_seconds)
        if state is State.READY:
            record.ever_ready = True
            record.cause = ""
        if record.state is not State.DRAINING and state is not State.DEAD:
            self._enter(record, state, now)

    def start_failed(self, name: ReplicaName, sentence: str, now: float, *, final: bool) -> None:
        """A build did not become ready. `final`: trying again would end the same way."""
        record = self._current(name)
        if record is None:
            return
        stopping = record.state is State.DRAINING
        self._fail(record, sentence, now)
        tries = len(record.failures)
        if not record.ever_ready and not stopping and not self.fatal and (final or tries >= START_TRIES):
            self.fatal = sentence

    def died(self, name: ReplicaName, cause: str, now: float) -> None:
        """A build that was ready is gone."""
        record = self._current(name)
        if record is not None:
            self._fail(record, cause, now)

    def stopped(self, name: ReplicaName, now: float) -> None:
        """A Stop is done: nothing of that build is left."""
        record = self._current(name)
        if record is not None:
            self._enter(record, State.DRAINED if record.held else State.DEAD, now)

    # -- decisions --------------------------------------------------------------------------------------------

    def actions(self, now: float) -> list[Action]:
        """What has to be done now. Each action is returned once."""
        found: list[Action] = []
        for record in self.records.values():
            found += self._judge(record, now)
        self.records = {key: record for key, record in self.records.items() if key in self._desired or not record.down}
        return found

    def _judge(self, record: Record, now: float) -> list[Action]:
        if record.held or record.replica_id not in self._desired:
            if record.state is State.DEAD and record.held:
                self._enter(record, State.DRAINED, now)
            if not record.running:
                return []
            drain = record.state is State.READY
            self._enter(record, State.DRAINING, now)
            return [Stop(record.name, drain)]
        if record.state is State.DEAD:
            if self.fatal or now < record.not_before:
                return []
            record.generation += 1
            self._enter(record, State.STARTING, now)
            return [Launch(record.name, record.model, record.role)]
        if record.state is State.STARTING and now - record.since > self._health.start_seconds:
            return self._give_up(
                record, f"{record.replica_id} was not ready after {self._health.start_seconds:g} s", now
            )
        if record.state is State.READY and now - record.heard > record.silence:
            record.cause = f"{record.replica_id} has been silent for {now - record.heard:.1f} s"
            self._enter(record, State.UNHEALTHY, now)
        if record.state is State.UNHEALTHY and now - record.since > self._health.replace_seconds:
            return self._give_up(record, f"{record.replica_id} was unhealthy for {now - record.since:.0f} s", now)
        return []

    def _give_up(self, record: Record, cause: str, now: float) -> list[Action]:
        stop = Stop(record.name, drain=False)
        self._fail(record, cause, now)
        return [stop]

    def crash_loop(self, record: Record, now: float) -> str:
        """A sentence for status when a replica fails again and again; else empty."""
        recent = [when for when in record.failures if now - when <= FAILURE_WINDOW_SECONDS]
        if len(recent) < CRASH_LOOP_FAILURES:
            return ""
        wait = max(0.0, record.not_before - now)
        return (
            f"crash loop: failed {len(recent)} times in {FAILURE_WINDOW_SECONDS / 60:.0f} minutes; "
            f"last: {record.cause or 'unknown'}" + (f"; next try in {wait:.0f} s" if wait else "")
        )

    # -- helpers ----------------------------------------------------------------------------------------------

    def _current(self, name: ReplicaName) -> Record | None:
        record = self.records.get(name.replica_id)
        if record is None or record.generation != name.generation or record.down:
            return None
        return record

    def _fail(self, record: Record, cause: str, now: float) -> None:
        record.failures = [when for when in record.failures if now - when <= FAILURE_WINDOW_SECONDS]
        record.failures.append(now)
        tries = len(record.failures)
        delay = 0.0 if tries == 1 else min(BACKOFF_LIMIT_SECONDS, 2.0 ** (tries - 2))
        record.not_before = now + delay
        record.cause = cause
        self._enter(record, State.DEAD, now)

    @staticmethod
    def _enter(record: Record, state: State, now: float) -> None:
        if record.state is not state:
            record.state = state
            record.since = now

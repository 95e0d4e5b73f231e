"""Decides the next actions as a pure function of events and time: no Ray, no clock, no sockets.

    spec ── desired ──▶ ┌────────────┐ ── actions(now) ──▶ Launch / Stop
    events of replicas ▶ │ Reconciler │
                         └────────────┘ ── records ──▶ status, member list

Each event carries its generation, so that a late event of an old build never changes the new one.
"""

from collections.abc import Iterable, Iterator

from headrace_cluster.core.health_judge import HealthJudge
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.record import Action, DesiredReplica, Launch, Record, State, Stop, another_answers
from headrace_cluster.core.rolling import next_outdated
from headrace_cluster.core.router_reports import RouterReports
from headrace_cluster.core.surges import Surges
from headrace_cluster.spec.process_specs import HealthSpec
from headrace_proto.stall import stall_limit

ROUTERS_SECONDS = 4.0  # after an adoption, for routers to find this controller: they try again within 3 s
START_TRIES = 3  # of a replica that was never ready, when it dies without a named error


class Reconciler:
    """Decides which replicas to build and which to end. Single-threaded; the caller passes the time."""

    def __init__(
        self, desired: Iterable[DesiredReplica], health: HealthSpec, router_reports: RouterReports | None = None
    ) -> None:
        """router_reports: which replicas routers receive from; none: only this controller judges them."""
        self._health = health
        self._health_judge = HealthJudge(health, router_reports or RouterReports())
        self.records: dict[str, Record] = {}
        self.surges = Surges(health)
        self.unable: dict[str, str] = {}  # replicas that were never ready and cannot start, and why
        self._routers_known_at = 0.0
        self.set_desired(desired)

    def set_desired(self, desired: Iterable[DesiredReplica]) -> None:
        """Replaces the desired replicas; the next calls of `actions` act on it."""
        self._desired = {entry.replica_id: entry for entry in desired}
        self.unable = {key: sentence for key, sentence in self.unable.items() if key in self._desired}
        for entry in self._desired.values():
            self.records.setdefault(entry.replica_id, Record(entry.replica_id, entry.model, entry.role))

    @property
    def ready(self) -> bool:
        """Whether every desired replica is ready; drained replicas do not count."""
        desired = (self.records[entry] for entry in self._desired)
        return all(record.state is State.READY for record in desired if not record.held)

    @property
    def fatal(self) -> str:
        """Why the cluster cannot start at all; empty while it can, and once any replica was ready."""
        if any(record.ever_ready for record in self.records.values()):
            return ""
        return next(iter(self.unable.values()), "")

    @property
    def desired(self) -> list[DesiredReplica]:
        """The desired replicas."""
        return list(self._desired.values())

    @property
    def idle(self) -> bool:
        """Whether no replica has a build."""
        return all(record.down for record in self.records.values()) and not self.surges.leaving

    def builds(self) -> Iterator[Record]:
        """Every build that exists or will be started, including those that start or end beside another one."""
        yield from self.records.values()
        yield from self.surges.builds()

    def drained(self, model: str) -> bool:
        """Whether an operator drained all replicas of the model that answer requests."""
        found = (self.records[entry.replica_id] for entry in self.desired if entry.model.name == model)
        held = [record.held for record in found if record.role.decodes]
        return bool(held) and all(held)

    def hold(self, replica_id: str) -> None:
        """Drains the replica and keeps it down."""
        self.records[replica_id].held = True
        self.records[replica_id].rolling = False

    def roll(self, replica_id: str, *, allow_gap: bool) -> bool:
        """Builds a ready replica again. Returns whether the next build starts beside it.

        It does if no other replica serves the model. If resources for two builds are missing, the replica stays as it
        is, or ends first with `allow_gap`. If another replica serves the model, it always ends first.
        """
        record = self.records[replica_id]
        beside = record.role.decodes and not another_answers(self.records, record)
        self.surges.failed.pop(replica_id, None)
        if beside:
            self.surges.begin(record, allow_gap=allow_gap)
        else:
            record.rolling = True
        return beside

    def release(self, replica_id: str) -> None:
        """Ends the hold: the replica is built at once, or as soon as it is drained."""
        record = self.records[replica_id]
        record.held, record.cause, record.failures, record.not_before = False, "", [], 0.0
        if record.state is State.DRAINED:
            record.state = State.DEAD
        record.rolling = record.state is State.DRAINING

    def adopted(self, name: ReplicaName, now: float) -> None:
        """A build of an earlier controller is up and becomes the current build of its replica."""
        record = self.records[name.replica_id]
        record.generation = name.generation
        record.built = max(record.built, name.generation)  # a newer one may have been starting: never reuse a number
        record.ever_ready = True
        record.silent, record.cause = False, ""
        record.last_health, record.silence_limit = now, self._health.silence_seconds
        record.enter(State.READY, now)
        self._routers_known_at = now + ROUTERS_SECONDS

    def silent(self, name: ReplicaName, now: float) -> None:
        """A build of an earlier controller may be up, but its ranks do not reply, and no record says what they are."""
        record = self.records[name.replica_id]
        record.generation = name.generation
        record.built = max(record.built, name.generation)
        record.silent = True
        record.cause = f"the ranks of {name.replica_id} do not reply to this controller; they are asked again"
        record.enter(State.STARTING, now)

    def starting(self, name: ReplicaName, now: float) -> None:
        """A build of an earlier controller becomes ready by itself."""
        record = self.records[name.replica_id]
        record.generation = name.generation
        record.built = max(record.built, name.generation)
        record.enter(State.STARTING, now)

    def adopted_beside(self, name: ReplicaName, now: float) -> Record:
        """The next build of an adopted one is up, too: it takes over as if this controller had started it."""
        record = self.records[name.replica_id]
        following = self.surges.restore(record, name.generation)
        following.last_health, following.silence_limit = now, self._health.silence_seconds
        following.enter(State.READY, now)
        return following

    def resume(self, gap: float, now: float) -> None:
        """The caller was paused for `gap` seconds and received nothing meanwhile: they do not count for any replica."""
        for record in self.builds():
            record.since = min(now, record.since + gap)
            record.last_health = min(now, record.last_health + gap)
            record.up_since = min(now, record.up_since + gap)

    # -- events -----------------------------------------------------------------------------------------------

    def health_received(
        self, name: ReplicaName, state: State, step_seconds: float, now: float, *, connected: bool = True
    ) -> None:
        """A health message: the step loop is alive. `step_seconds` is the predicted duration of its next step.

        connected: whether every router is connected to it.
        """
        record = self._current(name)
        if record is None:
            return
        record.last_health = now
        routers_known = now >= self._routers_known_at  # those of the last controller may not be registered yet
        record.connected = (record.connected or now) if connected and routers_known else None
        record.silence_limit = stall_limit(step_seconds, self._health.silence_seconds)
        if state is State.READY:
            record.ever_ready, record.cause = True, ""
            self.unable.pop(record.replica_id, None)
        if state is State.DRAINING and self.records.get(record.replica_id) is record and record.running:
            record.rolling = not record.held  # a late call of an earlier controller: it takes no requests any more
            record.enter(State.READY, now)  # its requests in flight may finish
        elif record.state is not State.DRAINING and state is not State.DEAD:
            record.enter(state, now)

    def waits_for_place(self, name: ReplicaName, reason: str, now: float) -> None:
        """A build that was launched has no place yet, for this reason; empty: it has one now.

        Its time to start begins then. A place may come at any time: with a node, or when another replica ends.
        """
        record = self._current(name)
        if record is None or record.state not in (State.PENDING, State.STARTING) or self.surges.is_next(record):
            return
        if reason or record.state is State.PENDING:  # else the cause remains: why it is started again
            record.cause = reason
        record.enter(State.PENDING if reason else State.STARTING, now)

    def started(self, name: ReplicaName, now: float) -> None:
        """The start of a build has returned: it sends health messages from now on."""
        record = self._current(name)
        if record is not None and record.state in (State.PENDING, State.STARTING):
            record.started, record.last_health, record.silence_limit = True, now, self._health.silence_seconds

    def start_failed(
        self, name: ReplicaName, sentence: str, now: float, *, final: bool, lacks_resources: bool = False
    ) -> None:
        """A build did not become ready.

        `final`: a retry would fail the same way. `lacks_resources`: beside the builds that run.
        """
        record = self._current(name)
        if record is None:
            return
        if self.surges.is_next(record):
            self._surge_failed(record, sentence, lacks_resources=lacks_resources)
            return
        stopping = record.state is State.DRAINING
        record.fail(sentence, now)
        tries = len(record.failures)
        if not record.ever_ready and not stopping and (final or tries >= START_TRIES):
            self.unable.setdefault(record.replica_id, sentence)

    def died(self, name: ReplicaName, cause: str, now: float) -> None:
        """A build that was ready has ended."""
        record = self._current(name)
        if record is None or self.surges.pop_leaving(record):
            return
        if self.surges.is_next(record):
            self._surge_failed(record, cause)
        elif record.state is State.DRAINING:  # it was being ended
            self.stopped(name, now)
        else:
            record.fail(cause, now)

    def stopped(self, name: ReplicaName, now: float) -> None:
        """A Stop has finished: nothing of that build exists."""
        record = self._current(name)
        if record is not None and not self.surges.pop_leaving(record):
            record.enter(State.DRAINED if record.held else State.DEAD, now)

    # -- decisions --------------------------------------------------------------------------------------------

    def actions(self, now: float) -> list[Action]:
        """The actions that are due. Each action is returned once."""
        found: list[Action] = []
        self._health_judge.look(self.records.values(), now)
        if (outdated := next_outdated(self.records, self.surges)) is not None:
            self.roll(outdated, allow_gap=False)
        for record in list(self.records.values()):
            found += self._judge_surge(record, now)
        found += self.surges.drain_leaving(now)
        for record in self.records.values():
            found += self._judge(record, now)
        self.records = {key: record for key, record in self.records.items() if key in self._desired or not record.down}
        return found

    def _judge_surge(self, record: Record, now: float) -> list[Action]:
        """The actions about the next build, which starts beside this one."""
        following = self.surges.following(record)
        if following is None:
            return []
        if record.state is State.DEAD and following.running:  # it ended meanwhile: the next one is already starting
            following.failures = record.failures
            self.records[record.replica_id] = self.surges.promote(record)
            return []
        if record.held or record.state is State.DEAD or record.replica_id not in self._desired:
            return self.surges.cancel(record)
        if self.surges.may_take_over(following, now):
            self.records[record.replica_id] = self.surges.promote(record)
            return []
        if self._health_judge.may_be_cut_off and following.state is not State.STARTING:
            return []
        if problem := self.surges.problem(following, now):
            stop = Stop(following.name, drain=False)
            self._surge_failed(following, problem)
            return [stop]
        return self.surges.launch(record, now)

    def _surge_failed(self, following: Record, sentence: str, *, lacks_resources: bool = False) -> None:
        record = self.records[following.replica_id]
        record.rolling = self.surges.fail(record, sentence, lacks_resources=lacks_resources)

    def _judge(self, record: Record, now: float) -> list[Action]:
        if record.held or record.replica_id not in self._desired:
            if record.state is State.DEAD and record.held:
                record.enter(State.DRAINED, now)
            if not record.running:
                return []
            drain = record.state is State.READY
            record.enter(State.DRAINING, now)
            return [Stop(record.name, drain, record.held)]
        if record.rolling and record.running:
            drain = record.state is State.READY
            record.enter(State.DRAINING, now)
            return [Stop(record.name, drain)]
        if record.state is State.DEAD:
            if self.fatal or now < record.not_before:
                return []
            record.rolling = record.outdated = record.silent = record.started = False
            record.generation = record.built = max(record.generation, record.built) + 1
            record.enter(State.STARTING, now)
            return [Launch(record.name, record.model, record.role)]
        if record.state is State.STARTING and record.started and now - record.last_health > record.silence_limit:
            record.enter(State.UNHEALTHY, now)  # routers connect to it then, and report whether they receive from it
            record.cause = f"{record.replica_id} has sent no health message since its start"
        elif record.state is State.STARTING:
            why = self._health_judge.judge_start(record, now)
            return self._replace(record, why, now) if why else []
        why = self._health_judge.judge(record, now)
        if record.state is State.READY:
            record.ever_ready = True
            self.unable.pop(record.replica_id, None)
        return self._replace(record, why, now) if why else []

    def _replace(self, record: Record, cause: str, now: float) -> list[Action]:
        stop = Stop(record.name, drain=False)
        record.fail(cause, now)
        return [stop]

    # -- helpers ----------------------------------------------------------------------------------------------

    def _current(self, name: ReplicaName) -> Record | None:
        return next((record for record in self.builds() if record.name == name and not record.down), None)

"""Builds that start beside the build they replace, and take over from it. Pure, like the reconciler that uses it.

begin ▶ launch ▶ starting ▶ ready, and every router connected ▶ promote: the old build drains and ends
                    └▶ fail: the old build continues
"""

from collections.abc import Iterator

from headrace_cluster.core.record import UP, Action, Launch, Record, State, Stop
from headrace_cluster.spec.process_specs import HealthSpec

STABLE_CONNECTION_SECONDS = 0.5  # that every router must be connected to the next build before the old one drains
CONNECT_SECONDS = 60.0  # for every router to connect to a build that is ready; a lost one counts for 40 s


class Surges:
    """By replica id: the next builds, the old builds that drain, and why the last next build failed."""

    def __init__(self, health: HealthSpec) -> None:
        self._health = health
        self._next: dict[str, Record] = {}
        self._allow_gap: set[str] = set()
        self.leaving: dict[str, Record] = {}
        self.failed: dict[str, str] = {}

    def begin(self, record: Record, *, allow_gap: bool) -> None:
        """Starts the next build of a replica beside it. `allow_gap`: without resources for two, it may end first."""
        self._next[record.replica_id] = Record(record.replica_id, record.model, record.role)
        if allow_gap:
            self._allow_gap.add(record.replica_id)

    def restore(self, record: Record, generation: int) -> Record:
        """The next build of an adopted replica, which an earlier controller started beside it."""
        following = Record(record.replica_id, record.model, record.role, generation, built=generation, ever_ready=True)
        self._next[record.replica_id] = following
        record.built = max(record.built, generation)
        return following

    def builds(self) -> Iterator[Record]:
        """Every build that is not in the reconciler's records."""
        yield from self._next.values()
        yield from self.leaving.values()

    def builds_of(self, record: Record) -> list[Record]:
        """Those of one replica."""
        return [other for other in self.builds() if other.replica_id == record.replica_id]

    def following(self, record: Record) -> Record | None:
        """The next build of this replica, if there is one."""
        return self._next.get(record.replica_id)

    def is_next(self, record: Record) -> bool:
        """Whether this is a next build."""
        return self._next.get(record.replica_id) is record

    def pop_leaving(self, record: Record) -> bool:
        """Whether this was an old build that drained; it is removed then."""
        if self.leaving.get(record.replica_id) is not record:
            return False
        del self.leaving[record.replica_id]
        return True

    def launch(self, record: Record, now: float) -> list[Action]:
        """The action that starts the next build, once."""
        following = self._next[record.replica_id]
        if following.state is not State.DEAD:
            return []
        record.built = max(record.generation, record.built) + 1
        following.generation = following.built = record.built
        following.enter(State.STARTING, now)
        return [Launch(following.name, following.model, following.role, beside=True)]

    def problem(self, following: Record, now: float) -> str:
        """Why a next build cannot take over; empty while it still can."""
        waited, silent = now - following.since, now - following.last_health
        if following.state is State.STARTING and waited > self._health.start_seconds:
            return f"it was not ready after {self._health.start_seconds:g} s"
        if following.state is State.UNHEALTHY and waited > self._health.replace_seconds:
            return f"it was unhealthy for {waited:.0f} s"
        if following.state is State.DRAINING and waited > self._health.replace_seconds:
            return f"it drained for {waited:.0f} s"
        up = following.state in UP
        if up and silent > following.silence_limit + self._health.replace_seconds:
            return f"it has sent no health message for {silent:.0f} s"
        if following.state is State.READY and following.connected is None and waited > CONNECT_SECONDS:
            return f"not every router was connected to it after {CONNECT_SECONDS:g} s"
        return ""

    def may_take_over(self, following: Record, now: float) -> bool:
        """Whether every router can send requests to the next build."""
        if following.state is not State.READY or following.connected is None:
            return False
        return (
            now - following.connected >= STABLE_CONNECTION_SECONDS
            and now - following.last_health <= following.silence_limit
        )

    def promote(self, record: Record) -> Record:
        """Makes the next build the current one and returns it; the old one drains, if it is up."""
        following = self._next.pop(record.replica_id)
        self._allow_gap.discard(record.replica_id)
        following.role, following.role_number, following.ever_ready = record.role, record.role_number, True
        if record.running:
            self.leaving[record.replica_id] = record
        return following

    def restore_leaving(self, record: Record, generation: int, now: float) -> None:
        """An adopted build from which this one, adopted too, has taken over: it drains until it has no requests."""
        old = Record(record.replica_id, record.model, record.role, generation, ever_ready=True)
        old.enter(State.READY, now)
        self.leaving[record.replica_id] = old

    def drain_leaving(self, now: float) -> list[Action]:
        """The actions that end old builds, once each."""
        found: list[Action] = []
        for record in self.leaving.values():
            if record.running:
                record.enter(State.DRAINING, now)
                found.append(Stop(record.name, drain=True))
        return found

    def fail(self, record: Record, sentence: str, *, lacks_resources: bool) -> bool:
        """The next build ended before it took over. Returns whether the old build is to end first, with a gap."""
        allowed = record.replica_id in self._allow_gap
        self._discard_next(record)
        if lacks_resources and allowed:
            return True
        self.failed[record.replica_id] = (
            f"resources for a second build beside it are missing ({sentence}); pass --allow-gap to end it first"
            if lacks_resources
            else f"its next build did not start, and the old one continues: {sentence}"
        )
        return False

    def mark_controller_lost(self, record: Record) -> None:
        """An earlier controller was lost before the next build of this replica took over; the old build continues."""
        self.failed[record.replica_id] = (
            "the controller was lost before its next build took over, and the old one continues; roll it again"
        )

    def cancel(self, record: Record) -> list[Action]:
        """Ends a next build that is not needed: the replica was removed, or is built again anyway."""
        following = self._next[record.replica_id]
        self._discard_next(record)
        return [] if following.down else [Stop(following.name, drain=False)]

    def _discard_next(self, record: Record) -> None:
        del self._next[record.replica_id]
        self._allow_gap.discard(record.replica_id)

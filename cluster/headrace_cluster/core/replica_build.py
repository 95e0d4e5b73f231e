"""One build of a replica, as a controller sees it: its ranks' reports, its health messages, and what follows. Pure.

pending ▶ starting ▶ ready ⇄ unhealthy ▶ draining ▶ gone          from each of them: dead ▶ gone
"""

from dataclasses import dataclass, field
from enum import StrEnum

from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.rank_config import ENDED, UP, RankReport, Stage
from headrace_proto.role import Role
from headrace_worker.core.config import ReplicaStarted

FAILURE_WINDOW_SECONDS = 300.0
CRASH_LOOP_FAILURES = 3
BACKOFF_LIMIT_SECONDS = 60.0
CAUSE_SECONDS = 2.0  # after one rank ended, for the rank with the cause to report it, or Ray that one was killed


class State(StrEnum):
    """State of a replica, as `headrace status` prints it."""

    PENDING = "pending"  # it waits for a place: for free GPUs and CPUs, or for nodes that come
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    UNHEALTHY = "unhealthy"
    DEAD = "dead"
    DRAINED = "drained"  # ended on demand, and not built again until an operator asks


SERVING = (State.READY, State.UNHEALTHY)  # its ranks are up, and it is not to end


@dataclass(frozen=True, slots=True)
class Death:
    """Why a build has ended, or did not become ready."""

    cause: str
    final: bool = False  # another start would fail the same way
    lacks_resources: bool = False  # there is too little memory


@dataclass(slots=True)
class Build:
    """Times are seconds of the caller's clock."""

    name: ReplicaName
    model: str
    tp: int = 1
    pp: int = 1
    digest: bytes = b""
    role: Role = Role.BOTH  # that routers use
    state: State = State.PENDING
    since: float = 0.0  # time since which the build is in this state
    up_since: float = 0.0  # that it was ready or unhealthy for the first time
    last_health: float = 0.0  # last health message
    silence_limit: float = 0.0  # seconds without a health message until it is unhealthy
    connected: float | None = None  # time since which every router is connected to it
    requests: int = 0  # that run or wait, by its last health message
    refuses: bool = False  # new ones, by the same message
    cause: str = ""  # cause of the state
    made_here: bool = False  # by this controller
    requested: bool = False  # its placement group
    placed: bool = False  # its placement group has a place
    filled: bool = False  # its ranks were created
    reports: dict[int, RankReport] = field(default_factory=dict)
    ranks: set[int] = field(default_factory=set)  # ranks that have an actor in Ray
    killed: dict[int, float] = field(default_factory=dict)  # when Ray reported their end
    failed_at: float | None = None  # the first rank
    touched: float = 0.0  # the last call that changes it has ended: what was seen before does not count
    leave_until: float | None = None  # it drains, and what still runs then moves
    leave_seconds: float = 0.0
    node_ends_at: float | None = None  # Ray drains a node with one of its ranks until then
    foreign: str = ""  # why it is left as it is: it has another secret

    @property
    def replica_id(self) -> str:
        return self.name.replica_id

    @property
    def size(self) -> int:
        """The number of its ranks."""
        return self.tp * self.pp

    @property
    def leaving(self) -> bool:
        """Whether it is to end."""
        return self.leave_until is not None or self.state is State.DEAD

    @property
    def serves(self) -> bool:
        """Whether it is ready and is not to end."""
        return self.state is State.READY and not self.leaving

    @property
    def answers(self) -> bool:
        """Whether every router places requests there now and will continue to."""
        return self.serves and self.role.decodes and self.connected is not None

    @property
    def started(self) -> ReplicaStarted | None:
        """The facts of rank 0, once all ranks have been ready."""
        up = [report for report in self.reports.values() if report.started is not None]
        return self.reports[0].started if len(up) == self.size and 0 in self.reports else None

    @property
    def silent(self) -> bool:
        """Whether ranks that another controller created have not replied yet."""
        return not self.made_here and not self.killed and bool(self.ranks - self.reports.keys())

    def enter(self, state: State, now: float) -> None:
        """Changes the state; `since` is kept if the state is the same."""
        if self.state is not state:
            if state in SERVING and self.state not in SERVING:
                self.up_since = now
            self.state, self.since = state, now

    def receive(self, rank: int, report: RankReport, now: float) -> None:
        """A rank reports."""
        self.reports[rank] = report
        self.model, self.tp, self.pp, self.digest = report.model, report.tp, report.pp, report.digest
        if report.stage in ENDED:
            self.failed_at = self.failed_at or now

    def kill(self, rank: int, now: float) -> None:
        """Ray reports that a rank has ended."""
        self.killed.setdefault(rank, now)
        self.failed_at = self.failed_at or now

    @property
    def up(self) -> bool:
        """Whether all ranks say that they serve."""
        stages = [report.stage for report in self.reports.values()]
        return len(stages) == self.size and all(stage in UP for stage in stages) and not self.killed

    @property
    def drains(self) -> bool:
        """Whether its first rank says that it accepts no requests any more."""
        return 0 in self.reports and self.reports[0].stage is Stage.DRAINING

    def death(self, now: float) -> Death | None:
        """Why it has ended; None while it has not, or while the rank with the cause may still report it."""
        if self.failed_at is None:
            return None
        named = [report for report in self.reports.values() if report.stage is Stage.FAILED and not report.secondary]
        ended = self.killed.keys() | {rank for rank, report in self.reports.items() if report.stage in ENDED}
        if not (named or self.killed or len(ended) >= self.size or now - self.failed_at > CAUSE_SECONDS):
            return None
        if named:
            return Death(named[0].error, named[0].final, named[0].lacks_resources)
        for rank in sorted(self.killed):
            if self.started is not None:
                return Death(f"{self._label(rank)} was killed{self._log_hint(rank)}")
            return Death(
                f"{self._label(rank)} was killed while it started; if memory is short, lower --kv-cache-memory, "
                f"--replicas, or take a smaller model{self._log_hint(rank)}"
            )
        rank = min(ended)
        return Death(f"{self._label(rank)} ended: {self.reports[rank].error}{self._log_hint(rank)}")

    def _label(self, rank: int) -> str:
        pid = f" (process {self.reports[rank].pid})" if rank in self.reports else ""
        return f"rank {rank} of {self.replica_id}{pid}"

    def _log_hint(self, rank: int) -> str:
        path = self.reports[rank].log_path if rank in self.reports else ""
        return f"; its log: {path}" if path else ""


@dataclass(slots=True)
class Slot:
    """What this controller remembers of one replica: a lost memory costs a repeated try."""

    failures: list[float] = field(default_factory=list)  # when its builds failed
    not_before: float = 0.0  # earliest time of the next build
    cause: str = ""  # cause of the last failure
    served: bool = False  # it was ready
    refused: bytes | None = None  # the digest whose build failed while an old one serves: it is not tried again
    refusal: str = ""  # why
    tries: dict[bytes, int] = field(default_factory=dict)  # that failed beside an old build, by digest
    asked: bool = False  # an operator wants it to be built again, since the last failure of its model
    waits: str = ""  # why it is not replaced now
    gap: bytes | None = None  # the digest for which the old build ends first: there is no room for two

    def fail(self, cause: str, now: float) -> None:
        """The next build follows at once, later after pauses."""
        self.failures = [when for when in self.failures if now - when <= FAILURE_WINDOW_SECONDS] + [now]
        tries = len(self.failures)
        self.not_before = now + (0.0 if tries == 1 else min(BACKOFF_LIMIT_SECONDS, 2.0 ** (tries - 2)))
        self.cause = cause

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

"""Which replicas are unhealthy, and which of these are to be replaced now. Pure."""

from collections.abc import Iterable

from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.record import UP, Record, State
from headrace_cluster.core.router_reports import RouterReports, Silence, judge_silence
from headrace_cluster.spec.process_specs import HealthSpec

BUDGET_SECONDS = 60.0  # in which health.stops_per_minute counts
SILENT_SECONDS = 60.0  # for the ranks of a build of an earlier controller to reply, until it may be ended
ALL_SILENT_FACTOR = 4  # longer until a replica is replaced while no router receives from any: they may be cut off, too
_WAITS = "; other replicas were replaced in the last minute, so it waits"


class HealthJudge:
    """Judges silence against all replicas, and bounds how many are replaced in a minute. Call `look` in each pass."""

    def __init__(self, health: HealthSpec, router_reports: RouterReports) -> None:
        self._health = health
        self._router_reports = router_reports
        self._silence: dict[ReplicaName, Silence] = {}  # a next build may take over between `look` and `judge`
        self._replaced: list[float] = []  # when, within the last minute

    def look(self, records: Iterable[Record], now: float) -> None:
        """Compares all replicas."""
        up = [record for record in records if record.state in UP]
        self._silence = judge_silence(up, self._router_reports, now)

    @property
    def may_be_cut_off(self) -> bool:
        """Whether the controller may be the reason of the silence: then it judges no next build by its silence."""
        return any(silence in (Silence.UNKNOWN, Silence.ALL_SILENT) for silence in self._silence.values())

    def judge(self, record: Record, now: float) -> str:
        """Sets whether a replica that is up is unhealthy. Returns why it is to be replaced now; empty if it is not."""
        silence = self._silence.get(record.name)
        if silence is not None:
            # Without the seconds so far: `serve` prints each sentence once.
            silent = f"{record.replica_id} has sent no health message for more than {record.silence_limit:g} s"
            record.cause = silent if silence is Silence.LOST else f"{silent}; {silence.value}"
        if silence in (Silence.LOST, Silence.ALL_SILENT):
            record.enter(State.UNHEALTHY, now)
        elif silence is Silence.RECEIVED:
            record.enter(State.READY, now)
        elif silence is Silence.UNKNOWN:
            record.since = now  # its time as unhealthy begins when that is certain
        limit = self._health.replace_seconds * (ALL_SILENT_FACTOR if silence is Silence.ALL_SILENT else 1)
        if record.state is not State.UNHEALTHY or now - record.since <= limit:
            return ""
        if not self.may_stop(now):
            record.cause = record.cause.removesuffix(_WAITS) + _WAITS
            return ""
        return f"{record.replica_id} was unhealthy for {now - record.since:.0f} s"

    def judge_start(self, record: Record, now: float) -> str:
        """Why a build that is not ready yet is to be replaced now; empty if it is not."""
        waited = now - record.since
        if record.silent and waited > SILENT_SECONDS and self.may_stop(now):
            return f"the ranks of {record.replica_id} did not reply for {waited:.0f} s"
        if not record.silent and waited > self._health.start_seconds:
            return f"{record.replica_id} was not ready after {self._health.start_seconds:g} s"
        return ""

    def may_stop(self, now: float) -> bool:
        """Whether another replica may be stopped in this minute; if so, it counts."""
        self._replaced = [when for when in self._replaced if now - when < BUDGET_SECONDS]
        if len(self._replaced) >= self._health.stops_per_minute:
            return False
        self._replaced.append(now)
        return True

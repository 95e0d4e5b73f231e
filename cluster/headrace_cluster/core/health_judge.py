"""Which replicas are unhealthy, and which of these are to be replaced now. Pure."""

from collections.abc import Iterable

from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.replica_build import SERVING, Build, State
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

    def look(self, builds: Iterable[Build], now: float) -> None:
        """Compares all replicas."""
        up = [build for build in builds if build.state in SERVING]
        self._silence = judge_silence(up, self._router_reports, now)

    def judge(self, build: Build, now: float) -> str:
        """Sets whether a replica that is up is unhealthy. Returns why it is to be replaced now; empty if it is not."""
        silence = self._silence.get(build.name)
        if silence is not None:
            # Without the seconds so far: `serve` prints each sentence once.
            silent = f"{build.replica_id} has sent no health message for more than {build.silence_limit:g} s"
            build.cause = silent if silence is Silence.LOST else f"{silent}; {silence.value}"
        if silence in (Silence.LOST, Silence.ALL_SILENT):
            build.enter(State.UNHEALTHY, now)
        elif silence is Silence.RECEIVED:
            build.enter(State.READY, now)
        elif silence is Silence.UNKNOWN:
            build.since = now  # its time as unhealthy begins when that is certain
        limit = self._health.replace_seconds * (ALL_SILENT_FACTOR if silence is Silence.ALL_SILENT else 1)
        if build.state is not State.UNHEALTHY or now - build.since <= limit:
            return ""
        if not self.may_stop(now):
            build.cause = build.cause.removesuffix(_WAITS) + _WAITS
            return ""
        return f"{build.replica_id} was unhealthy for {now - build.since:.0f} s"

    def judge_start(self, build: Build, now: float, *, others_reply: bool) -> str:
        """Why a build that is not ready yet is to be replaced now; empty if it is not.

        others_reply: ranks of another build do; else this controller may be cut off.
        """
        waited = now - build.since
        if not build.silent and waited > self._health.start_seconds:
            return f"{build.replica_id} was not ready after {self._health.start_seconds:g} s"
        heard = self._router_reports.receives(build.name, now)
        limit = SILENT_SECONDS if others_reply else self._health.replace_seconds * ALL_SILENT_FACTOR
        lost = not heard if others_reply else heard is False
        if build.silent and waited > limit and lost and self.may_stop(now):
            return f"the ranks of {build.replica_id} did not reply for {waited:.0f} s"
        return ""

    def may_stop(self, now: float) -> bool:
        """Whether another replica may be stopped in this minute; if so, it counts."""
        self._replaced = [when for when in self._replaced if now - when < BUDGET_SECONDS]
        if len(self._replaced) >= self._health.stops_per_minute:
            return False
        self._replaced.append(now)
        return True

"""What a controller shows of its replicas: the status document, progress of starts, requests in flight."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from headrace_cluster.controller.build import Build
from headrace_cluster.controller.draining import Drains
from headrace_cluster.controller.members import Membership
from headrace_cluster.controller.retries import Retries
from headrace_cluster.controller.status import build_status, replica_status, router_status
from headrace_cluster.core.driver import Progress
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.reconciler import Reconciler
from headrace_cluster.core.record import Record, State
from headrace_worker.core.config import ReplicaStarted

OUTDATED = "it runs as an earlier spec described it; it is built again in turn"


class Overview:
    """Reads the state of a supervisor. Times are seconds of `clock`."""

    def __init__(
        self,
        reconciler: Reconciler,
        builds: Mapping[ReplicaName, Build],
        membership: Membership,
        drains: Drains,
        retries: Retries,
        clock: Callable[[], float],
    ) -> None:
        self._reconciler = reconciler
        self._builds = builds
        self._membership = membership
        self._drains = drains
        self._retries = retries
        self._clock = clock
        self.found_problems: Sequence[str] = ()  # when this controller started

    def status(self) -> dict[str, Any]:
        """The document that `headrace status --json` prints."""
        now = self._clock()
        replicas, surges = [], self._reconciler.surges
        for record in self._reconciler.records.values():
            build = self._builds.get(record.name, Build())
            note = self._drains.note(record) or record.crash_loop(now) or record.cause
            note = note or self._stage(record) or (OUTDATED if record.outdated else "")
            others = ((other, self._builds.get(other.name, Build())) for other in surges.builds_of(record))
            beside = [build_status(other, known.health, self._stage(other)) for other, known in others]
            failed = surges.failed.get(record.replica_id, "")
            replicas.append(replica_status(record, build.ranks, build.health, note, beside, failed))
        known = sorted(self._membership.routers.values(), key=lambda router: router.metrics)
        unreached = self._membership.unreached
        routers = [
            router_status(router, unreached.get(router.id, ""), self._membership.placements(router.id))
            for router in known
        ]
        problems = [*self.found_problems, *self._retries.problems, *unreached.values()]
        return {"replicas": replicas, "routers": routers, "problems": problems}

    def started(self) -> dict[str, ReplicaStarted]:
        """Facts of the replicas that are up, by id."""
        return {name.replica_id: build.started for name, build in self._builds.items() if build.started is not None}

    @property
    def in_flight(self) -> int:
        """Requests that replicas run or queue, builds that drain beside their next one included."""
        loads = [build.health.load for build in self._builds.values() if build.health is not None and not build.ended]
        return sum(load.running + load.waiting for load in loads)

    def progress(self) -> dict[str, Progress]:
        """Progress of starting replicas, by id."""
        return {
            record.replica_id: self._builds[record.name].progress or Progress(record.cause or "placing it", 0.0)
            for record in self._reconciler.records.values()
            if record.state in (State.PENDING, State.STARTING) and record.name in self._builds
        }

    def _stage(self, record: Record) -> str:
        progress = self._builds.get(record.name, Build()).progress
        return progress.stage if progress is not None and record.state is State.STARTING else ""

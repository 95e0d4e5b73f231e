"""Records profiles of running replicas on demand."""

from collections.abc import Mapping
from typing import Any

from headrace_cluster.controller.build import Build
from headrace_cluster.controller.roles import no_such_replica
from headrace_cluster.controller.status import profile_document
from headrace_cluster.core.driver import ReplicaDriver
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.reconciler import Reconciler
from headrace_cluster.core.record import Record
from headrace_cluster.errors import ProfileError


class Profiles:
    """`builds`: of the supervisor, which changes it."""

    def __init__(self, reconciler: Reconciler, driver: ReplicaDriver, builds: Mapping[ReplicaName, Build]) -> None:
        self._reconciler = reconciler
        self._driver = driver
        self._builds = builds

    async def record(self, replica_id: str | None, steps: int, seconds: float) -> dict[str, Any]:
        """Records the next steps of every rank of a replica (None: of the only one).

        Returns the document of POST /profile, with the paths of the traces. Raises ProfileError.
        """
        record = self._chosen(replica_id)
        build = self._builds.get(record.name)
        if build is None or build.started is None:
            raise ProfileError(f"{record.replica_id} is {record.state}: ask again when it is ready")
        outcomes = await self._driver.profile(record.name, steps, seconds)
        if not any(outcome.report is not None for outcome in outcomes):
            raise ProfileError(next((outcome.error for outcome in outcomes), f"{record.replica_id} has just ended"))
        return profile_document(record.name, build.ranks, outcomes)

    def _chosen(self, replica_id: str | None) -> Record:
        records = self._reconciler.records
        if replica_id is None:
            if len(records) != 1:
                raise ProfileError(f"which replica? Name one of: {', '.join(records)}")
            return next(iter(records.values()))
        if replica_id not in records:
            raise ProfileError(no_such_replica(records, replica_id))
        return records[replica_id]

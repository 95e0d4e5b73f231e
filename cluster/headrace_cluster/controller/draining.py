"""Takes a replica out on demand: what runs there finishes or moves, then it ends and stays down until it is wanted."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from headrace_cluster.controller.build import Build
from headrace_cluster.controller.reconciler import Reconciler, Record, State
from headrace_cluster.controller.roles import another_answers, no_such_replica
from headrace_cluster.errors import DrainError
from headrace_cluster.naming import ReplicaName

LOOK_SECONDS = 0.05


class Drains:
    """Which builds may finish their requests, and until when. Of one event loop.

    `changed` has the reconciler look at once. Times are seconds of `clock`.
    """

    def __init__(
        self, reconciler: Reconciler, seconds: float, clock: Callable[[], float], changed: Callable[[], None]
    ) -> None:
        self._reconciler = reconciler
        self._seconds = seconds
        self._clock = clock
        self._changed = changed
        self._until: dict[ReplicaName, float] = {}

    def begin(self, replica_id: str, seconds: float | None = None, *, force: bool = False) -> dict[str, Any]:
        """Takes the replica out; asking twice changes nothing. Raises DrainError.

        seconds: for requests in flight; what still runs then goes on at other replicas. None = as the spec says.
        """
        record = self._find(replica_id)
        seconds = self._seconds if seconds is None else seconds
        if not record.held:
            losing = record.role.decodes and record.state in (State.READY, State.UNHEALTHY)
            if losing and not force and not another_answers(self._reconciler.records, record):
                raise DrainError(
                    f"without {replica_id} no ready replica of {record.model.name} could decode; bring up another one "
                    "first, or pass --force"
                )
            if record.running:
                self._until[record.name] = self._clock() + seconds
            self._reconciler.hold(replica_id)
            self._changed()
        return {"id": replica_id, "generation": record.generation, "seconds": seconds}

    def end(self, replica_id: str) -> dict[str, Any]:
        """The replica is wanted again: the next generation follows the last of this one. Raises DrainError."""
        record = self._find(replica_id)
        if not record.held:
            raise DrainError(f"{replica_id} is {record.state}, not drained: there is nothing to bring back")
        self._reconciler.release(replica_id)
        self._changed()
        return {"id": replica_id, "generation": record.generation}

    async def emptied(self, name: ReplicaName, build: Build) -> None:
        """Returns when no request is in flight at a build that takes no new ones, or the time for that is over."""
        self._until.setdefault(name, self._clock() + self._seconds)
        while self._clock() < self._until[name]:
            if build.emptied:
                break
            await asyncio.sleep(LOOK_SECONDS)
        del self._until[name]

    def hurry(self) -> None:
        """Everything ends: nobody gets more time than the spec gives."""
        latest = self._clock() + self._seconds
        self._until = {name: min(until, latest) for name, until in self._until.items()}

    def left(self) -> dict[ReplicaName, float]:
        """Seconds until what still runs at a draining build moves."""
        return {name: max(0.0, until - self._clock()) for name, until in self._until.items()}

    def resume(self, left: Mapping[ReplicaName, float]) -> None:
        """The other end of `left`, for drains that an earlier controller began."""
        self._until |= {name: self._clock() + seconds for name, seconds in left.items()}

    def note(self, record: Record) -> str:
        """A sentence for status; empty for a replica that nobody wants down."""
        if not record.held:
            return ""
        if record.state is State.DRAINED:
            return f"drained; `headrace undrain {record.replica_id}` brings it back"
        left = self._until.get(record.name, 0.0) - self._clock()
        return f"draining: what still runs in {left:.0f} s moves" if left > 0 else "draining: it is being stopped"

    def _find(self, replica_id: str) -> Record:
        records = self._reconciler.records
        if replica_id not in records:
            raise DrainError(no_such_replica(records, replica_id))
        return records[replica_id]

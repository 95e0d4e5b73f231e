"""Drains a replica on demand: its requests finish or move, then it ends and stays down until `undrain`."""

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from headrace_cluster.controller.build import Build
from headrace_cluster.controller.members import Membership
from headrace_cluster.controller.roles import no_such_replica
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.reconciler import Reconciler
from headrace_cluster.core.record import Record, State, another_answers, peers, unconnected_peer
from headrace_cluster.core.rolling import roll_obstacle
from headrace_cluster.errors import DrainError
from headrace_cluster.program import program_name

POLL_SECONDS = 0.05


class Drains:
    """Which builds may finish their requests, and until when. For one event loop.

    `changed` wakes the supervisor at once. Times are seconds of `clock`.
    """

    def __init__(
        self,
        reconciler: Reconciler,
        seconds: float,
        clock: Callable[[], float],
        changed: Callable[[], None],
        membership: Membership,
    ) -> None:
        self._reconciler = reconciler
        self._seconds = seconds
        self._clock = clock
        self._changed = changed
        self._membership = membership
        self._deadlines: dict[ReplicaName, float] = {}
        self._pending: dict[ReplicaName, float] = {}  # seconds of drains that have not begun

    def begin(self, replica_id: str, seconds: float | None = None, *, force: bool = False) -> dict[str, Any]:
        """Drains the replica; a second call changes nothing. Raises DrainError.

        seconds: for requests in flight; those that still run then move to other replicas. None = the spec's value.
        """
        record = self._find(replica_id)
        seconds = self._seconds if seconds is None else seconds
        if not record.held:
            losing = record.role.decodes and record.state in (State.READY, State.UNHEALTHY)
            if losing and not force and not another_answers(self._reconciler.records, record):
                if problem := unconnected_peer(self._reconciler.records, record):
                    raise DrainError(problem + self._unreached())
                raise DrainError(
                    f"without {replica_id} no ready replica of {record.model.name} could decode; bring up another "
                    "one first, or pass --force"
                )
            if record.running:
                self._deadlines[record.name] = self._clock() + seconds
            self._reconciler.hold(replica_id)
            self._changed()
        return {"id": replica_id, "generation": record.generation, "seconds": seconds}

    def roll(self, replica_id: str, seconds: float | None = None, *, allow_gap: bool = False) -> dict[str, Any]:
        """Builds a ready replica again; `beside`: the next build starts before this one drains. Raises DrainError.

        seconds: for requests in flight, as for `begin`. allow_gap: also while another replica of the model does not
        serve; and if none serves it and resources for two builds are missing, it ends before the next one starts.
        """
        record = self._find(replica_id)
        surges = self._reconciler.surges
        if record.state is not State.READY or record.held:
            raise DrainError(
                f"{replica_id} is {'drained' if record.held else record.state}: run rollout again when it is ready"
            )
        if record.rolling or surges.following(record) is not None or replica_id in surges.leaving:
            raise DrainError(f"{replica_id} is being rolled already; see `{program_name()} status`")
        problem = "" if allow_gap else roll_obstacle(peers(self._reconciler.records, record), surges)
        if problem:
            raise DrainError(f"{problem}, or pass --allow-gap{self._unreached()}")
        seconds = self._seconds if seconds is None else seconds
        self._pending[record.name] = seconds
        beside = self._reconciler.roll(replica_id, allow_gap=allow_gap)
        self._changed()
        return {"id": replica_id, "generation": record.generation, "seconds": seconds, "beside": beside}

    def end(self, replica_id: str) -> dict[str, Any]:
        """Ends the hold: the next generation starts after this one has ended. Raises DrainError."""
        record = self._find(replica_id)
        if not record.held:
            raise DrainError(f"{replica_id} is {record.state}, not drained: there is nothing to bring back")
        self._reconciler.release(replica_id)
        self._changed()
        return {"id": replica_id, "generation": record.generation}

    async def wait_until_empty(self, name: ReplicaName, build: Build) -> None:
        """Returns when a draining build has no request in flight, or at its deadline."""
        self._deadlines.setdefault(name, self._clock() + self._pending.pop(name, self._seconds))
        while self._clock() < self._deadlines[name]:
            if build.is_empty:
                break
            await asyncio.sleep(POLL_SECONDS)
        self.discard(name)

    def discard(self, name: ReplicaName) -> None:
        """The build has ended, perhaps without draining: it had no requests, or was unhealthy."""
        self._deadlines.pop(name, None)

    def discard_failed(self) -> None:
        """Discards the seconds of builds that are no longer replaced: their next build failed."""
        self._pending = {name: seconds for name, seconds in self._pending.items() if self._is_rolled(name)}

    def _is_rolled(self, name: ReplicaName) -> bool:
        build = next((record for record in self._reconciler.builds() if record.name == name), None)
        if build is None:
            return False
        draining = build.state is State.DRAINING  # `wait_until_empty` takes the seconds
        return build.rolling or draining or self._reconciler.surges.following(build) is not None

    def cap_deadlines(self) -> None:
        """The cluster stops: no drain takes longer than the spec allows."""
        self._pending.clear()
        latest = self._clock() + self._seconds
        self._deadlines = {name: min(until, latest) for name, until in self._deadlines.items()}

    def remaining(self) -> dict[ReplicaName, float]:
        """Seconds until the requests of a build move, from now on or from the beginning of its drain."""
        return self._pending | {name: max(0.0, until - self._clock()) for name, until in self._deadlines.items()}

    def resume(self, remaining: Mapping[ReplicaName, float]) -> None:
        """The inverse of `remaining`, for drains that an earlier controller began or was to begin."""
        self._pending |= remaining

    def note(self, record: Record) -> str:
        """A sentence for status; empty for a replica that is neither drained nor rolled."""
        if record.rolling:
            return "draining: it is built again next"
        if not record.held:
            return ""
        if record.state is State.DRAINED:
            return f"drained; `{program_name()} undrain {record.replica_id}` brings it back"
        left = self._deadlines.get(record.name, 0.0) - self._clock()
        return f"draining: what still runs in {left:.0f} s moves" if left > 0 else "draining: it is being stopped"

    def _unreached(self) -> str:
        """The end of a sentence: routers to which a replica cannot be connected."""
        return "".join(f"; {sentence}" for sentence in self._membership.unreached.values())

    def _find(self, replica_id: str) -> Record:
        records = self._reconciler.records
        if replica_id not in records:
            raise DrainError(no_such_replica(records, replica_id))
        return records[replica_id]

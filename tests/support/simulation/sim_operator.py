"""Someone who drains replicas and brings them back, with the operations of production's admin API."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from headrace_cluster.core.record import State
from headrace_cluster.errors import DrainError
from support.simulation.control_checks import LISTED_SECONDS

if TYPE_CHECKING:
    from support.simulation.managed_cluster import ManagedCluster

PATIENCE_SECONDS = 1.0  # for a response, until the call is repeated: its controller may have been lost


class SimOperator:
    """Each call is repeated until one controller has responded to it."""

    def __init__(self, cluster: "ManagedCluster") -> None:
        self._cluster = cluster
        self._world = cluster.world

    def drain(self) -> None:
        """Drains a ready replica, and ends the drain some seconds after the response."""
        controller, checks = self._cluster.controller, self._cluster.checks
        if controller is None or not controller.answers:
            return
        records = controller.supervisor.reconciler.records.values()
        ready = [record.replica_id for record in records if record.state is State.READY and not record.held]
        free = [replica_id for replica_id in ready if replica_id not in checks.operated]
        if free:
            replica_id = self._world.random.choice(free)
            checks.operated.add(replica_id)
            self._call("/drain", replica_id, partial(self._drained, replica_id))

    def _drained(self, replica_id: str, error: DrainError | None, recorded: bool) -> None:
        if error is not None:
            self._cluster.checks.operated.discard(replica_id)
            return
        if recorded:
            self._cluster.checks.drained.add(replica_id)
        self._cluster.fault_later(self._world.random.uniform(0.2, 8.0), lambda: self._undrain(replica_id))

    def _undrain(self, replica_id: str) -> None:
        self._cluster.checks.drained.discard(replica_id)
        # An error: an earlier call, to which no controller responded, ended the drain.
        self._call("/undrain", replica_id, lambda _, recorded: self._await_ready(replica_id, recorded))

    def _await_ready(self, replica_id: str, recorded: bool) -> None:
        """Routers know a little later that it serves again. A drain whose end was not recorded may be back."""
        controller = self._cluster.controller
        record = None if controller is None else controller.supervisor.reconciler.records.get(replica_id)
        if record is not None and record.state is State.READY and not record.rolling:
            self._cluster.fault_later(LISTED_SECONDS, lambda: self._cluster.checks.operated.discard(replica_id))
        elif record is not None and record.held and not recorded:
            self._undrain(replica_id)
        else:
            self._cluster.fault_later(0.5, lambda: self._await_ready(replica_id, recorded))

    def _call(self, path: str, replica_id: str, responded: Callable[[DrainError | None, bool], None]) -> None:
        controller = self._cluster.controller
        if controller is None or not controller.answers:
            self._cluster.fault_later(PATIENCE_SECONDS, lambda: self._call(path, replica_id, responded))
            return
        done = False

        def respond(error: DrainError | None, recorded: bool) -> None:
            nonlocal done
            if not done:
                done = True
                self._log(f"{path} {replica_id}: {error or 'accepted'}{'' if recorded else ', not recorded'}")
                responded(error, recorded)

        def wait() -> None:
            nonlocal done
            if not done and controller.alive:
                self._cluster.fault_later(PATIENCE_SECONDS, wait)
            elif not done:
                done = True
                self._call(path, replica_id, responded)

        self._log(f"{path} {replica_id}")
        controller.operate(path, replica_id, respond)
        self._cluster.fault_later(PATIENCE_SECONDS, wait)

    def _log(self, sentence: str) -> None:
        if self._world.tracing:
            self._world.log(f"*** operator: {sentence}")

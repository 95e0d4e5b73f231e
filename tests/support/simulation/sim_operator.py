"""Someone who drains replicas, brings them back and changes roles, with the operations of production's admin API."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from headrace_proto.errors import HeadraceError
from headrace_proto.role import Role
from support.simulation.control_checks import LISTED_SECONDS

if TYPE_CHECKING:
    from support.simulation.managed_cluster import ManagedCluster

Responded = Callable[[HeadraceError | None, bool], None]  # with its error, or whether the next controller would know

PATIENCE_SECONDS = 1.0  # for a response, until the call is repeated: its controller may have been lost


class SimOperator:
    """Each call is repeated until one controller has responded to it."""

    def __init__(self, cluster: "ManagedCluster") -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._changing: set[str] = set()  # replicas with a call for another role

    def drain(self) -> None:
        """Drains a ready replica, and ends the drain some seconds after the response."""
        controller, checks = self._cluster.controller, self._cluster.checks
        if controller is None or not controller.answers:
            return
        planner = controller.planner
        ready = [name for name, wanted in planner.wanted.items() if planner.is_ready(name) and not wanted.drained]
        free = [replica_id for replica_id in ready if replica_id not in checks.operated]
        if free:
            replica_id = self._world.random.choice(free)
            checks.operated.add(replica_id)
            self._call("/drain", replica_id, partial(self._drained, replica_id))

    def _drained(self, replica_id: str, error: HeadraceError | None, recorded: bool) -> None:
        if error is not None:
            self._cluster.checks.operated.discard(replica_id)
            return
        if recorded:
            self._cluster.checks.drained.add(replica_id)
        self._cluster.fault_later(self._world.random.uniform(0.2, 8.0), lambda: self._undrain(replica_id))

    def change_role(self) -> None:
        """Gives a replica another role; one change of a replica at a time."""
        controller = self._cluster.controller
        if controller is None or not controller.answers:
            return
        free = [replica_id for replica_id in controller.planner.wanted if replica_id not in self._changing]
        if free:
            replica_id, role = self._world.random.choice(free), self._world.random.choice(tuple(Role))
            self._changing.add(replica_id)
            self._cluster.checks.roles[replica_id].add(role)
            self._call("/role", replica_id, partial(self._role_changed, replica_id, role), role=str(role))

    def _role_changed(self, replica_id: str, role: Role, error: HeadraceError | None, recorded: bool) -> None:
        self._changing.discard(replica_id)
        if error is None and recorded:
            self._cluster.checks.roles[replica_id] = {role}

    def _undrain(self, replica_id: str) -> None:
        self._cluster.checks.drained.discard(replica_id)
        # An error: an earlier call, to which no controller responded, ended the drain.
        self._call("/undrain", replica_id, lambda _, recorded: self._await_ready(replica_id, recorded))

    def _await_ready(self, replica_id: str, recorded: bool) -> None:
        """Routers know a little later that it serves again. A drain whose end was not recorded may be back."""
        controller = self._cluster.controller
        wanted = None if controller is None else controller.planner.wanted.get(replica_id)
        if controller is not None and controller.planner.is_ready(replica_id):
            self._cluster.fault_later(LISTED_SECONDS, lambda: self._cluster.checks.operated.discard(replica_id))
        elif wanted is not None and wanted.drained and not recorded:
            self._undrain(replica_id)
        else:
            self._cluster.fault_later(0.5, lambda: self._await_ready(replica_id, recorded))

    def _call(self, path: str, replica_id: str, responded: Responded, **given: str) -> None:
        controller = self._cluster.controller
        if controller is None or not controller.answers:
            self._cluster.fault_later(PATIENCE_SECONDS, lambda: self._call(path, replica_id, responded, **given))
            return
        done = False

        def respond(error: HeadraceError | None, recorded: bool) -> None:
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
                self._call(path, replica_id, responded, **given)

        self._log(f"{path} {replica_id} {' '.join(given.values())}")
        controller.operate(path, {"replica": replica_id, **given}, respond)
        self._cluster.fault_later(PATIENCE_SECONDS, wait)

    def _log(self, sentence: str) -> None:
        if self._world.tracing:
            self._world.log(f"*** operator: {sentence}")

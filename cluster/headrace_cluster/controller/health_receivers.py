"""Passes the health messages of builds to the reconciler."""

from collections.abc import Callable, Mapping

import structlog

from headrace_cluster.controller.build import Build
from headrace_cluster.controller.health import STATES
from headrace_cluster.controller.members import Membership
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.reconciler import Reconciler
from headrace_cluster.core.record import State
from headrace_proto import replica_pb2

log = structlog.get_logger(__name__)


class HealthReceivers:
    """Makes a receiver for each build. For one event loop."""

    def __init__(
        self,
        reconciler: Reconciler,
        builds: Mapping[ReplicaName, Build],
        membership: Membership,
        silence_seconds: float,
        clock: Callable[[], float],
        wake: Callable[[], None],
        check_role: Callable[[ReplicaName, int], None],
    ) -> None:
        """silence_seconds: of a build, until what it reported may be over. wake: called when a state has changed.

        check_role: called with the role that each message has.
        """
        self._reconciler = reconciler
        self._builds = builds
        self._membership = membership
        self._silence_seconds = silence_seconds
        self._clock = clock
        self._wake = wake
        self._check_role = check_role

    def receiver(self, name: ReplicaName, build: Build) -> Callable[[replica_pb2.ReplicaHealth], None]:
        """Called with each message of this build."""

        def receive(health: replica_pb2.ReplicaHealth) -> None:
            before = build.health
            build.health, build.health_at = health, self._clock()
            state = STATES.get(health.state, State.UNHEALTHY)
            step_seconds = health.load.predicted_step_ms / 1e3
            connected = health.routers >= self._known_routers(build)
            self._reconciler.health_received(name, state, step_seconds, self._clock(), connected=connected)
            self._check_role(name, health.identity.role)
            if before is None or before.state != health.state:
                log.info(str(state), replica=name.replica_id, generation=name.generation)
                self._wake()

        return receive

    def _known_routers(self, build: Build) -> int:
        """The number of routers that count here, or by other builds: they know routers that are cut off from here."""
        since = self._clock() - self._silence_seconds
        others = (other for other in self._builds.values() if other is not build and other.health_at >= since)
        return max([self._membership.counted_routers, *(other.health.routers for other in others if other.health)])

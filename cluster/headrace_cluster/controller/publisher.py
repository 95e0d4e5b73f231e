"""Makes the member list of routers from the records and builds, and publishes it."""

from collections.abc import Callable, Mapping

from headrace_cluster.controller.build import Build
from headrace_cluster.controller.members import PROTO_STATES, Membership
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.reconciler import Reconciler
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_proto import control_pb2


class Publisher:
    """For one event loop. Times are seconds of `clock`."""

    def __init__(
        self,
        spec: ClusterSpec,
        reconciler: Reconciler,
        builds: Mapping[ReplicaName, Build],
        membership: Membership,
        clock: Callable[[], float],
        created: int,
    ) -> None:
        """created: unix seconds, the date of the models in /v1/models."""
        self.created = created
        self._spec = spec
        self._reconciler = reconciler
        self._builds = builds
        self._membership = membership
        self._clock = clock
        self._withhold_until = 0.0

    def withhold(self, seconds: float) -> None:
        """Publishes nothing until every replica that is up has sent health, or the seconds have passed."""
        self._withhold_until = self._clock() + seconds

    async def publish(self) -> None:
        """Sends the list to routers if it has changed."""
        incomplete = any(build.started is not None and build.health is None for build in self._builds.values())
        if incomplete and self._clock() < self._withhold_until:
            return  # routers keep the previous controller's list: an incomplete one would remove replicas that are up
        members = []
        for record in self._reconciler.builds():
            build = self._builds.get(record.name)
            if build is None or build.started is None or build.health is None:
                continue
            state = PROTO_STATES[record.state]
            member = control_pb2.Member(identity=build.health.identity, address=build.started.address, state=state)
            member.identity.role = record.role.number  # a health message may be older than the last flip
            members.append(member)
        models = [
            control_pb2.ModelEntry(
                name=model.name, aliases=model.aliases, created=self.created, revision=model.revision or ""
            )
            for model in self._spec.models
        ]
        await self._membership.publish(members, models)

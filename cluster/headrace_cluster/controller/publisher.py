"""Makes the member list of routers from the records and builds, and publishes it."""

from collections.abc import Mapping

from headrace_cluster.controller.build import Build
from headrace_cluster.controller.members import PROTO_STATES, Membership
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.reconciler import Reconciler
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_proto import control_pb2, replica_pb2
from headrace_worker.core.config import ReplicaStarted


class Publisher:
    """For one event loop."""

    def __init__(
        self,
        spec: ClusterSpec,
        reconciler: Reconciler,
        builds: Mapping[ReplicaName, Build],
        membership: Membership,
        created: int,
    ) -> None:
        """created: unix seconds, the date of the models in /v1/models."""
        self.created = created
        self._spec = spec
        self._reconciler = reconciler
        self._builds = builds
        self._membership = membership

    async def publish(self) -> None:
        """Sends the list to routers if it has changed.

        An adopted build is listed before its first health message: routers judge by themselves whether they hear it.
        """
        members = []
        for record in self._reconciler.builds():
            build = self._builds.get(record.name)
            if build is None or build.started is None:
                continue
            state = PROTO_STATES[record.state]
            identity = _identity(record.name, build.started)  # not what the replica claims to be in its messages
            identity.role = record.role.number
            members.append(control_pb2.Member(identity=identity, address=build.started.address, state=state))
        models = [
            control_pb2.ModelEntry(
                name=model.name,
                aliases=model.aliases,
                created=self.created,
                revision=model.revision or "",
                drained=self._reconciler.drained(model.name),
            )
            for model in self._spec.models
        ]
        await self._membership.publish(members, models)


def _identity(name: ReplicaName, started: ReplicaStarted) -> replica_pb2.ReplicaIdentity:
    return replica_pb2.ReplicaIdentity(
        replica_id=name.replica_id,
        generation=name.generation,
        boot_id=started.boot_id,
        model=started.model,
        revision=started.revision,
        dtype=started.dtype,
    )

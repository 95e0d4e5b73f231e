"""A cluster with one router whose member list the schedule itself writes."""

from functools import partial

from headrace_proto import control_pb2 as control
from headrace_proto import replica_pb2 as pb
from support.simulation.client_request import ClientRequest
from support.simulation.sim_cluster import Cluster
from support.simulation.sim_model import Model
from support.simulation.sim_replica import Shape, SimReplica
from support.simulation.sim_router import SimRouter
from support.simulation.world import World


class ScheduledCluster(Cluster):
    """Replicas are found by name: each has one build at a time."""

    def __init__(
        self, world: World, model: Model, shapes: list[Shape], decoders: set[str], source_share: float
    ) -> None:
        super().__init__(world, model)
        self._shapes = {shape.name: shape for shape in shapes}
        self._decoders = decoders
        self._generations: dict[str, int] = {}
        self._removed: set[str] = set()
        self._listed = 0
        self.router = SimRouter(self, source_share)
        self.routers.append(self.router)
        for shape in shapes:
            self.start(shape.name)
        self.publish()

    @property
    def names(self) -> list[str]:
        return list(self._shapes)

    def decodes(self, name: str) -> bool:
        return name in self._decoders

    def build(self, name: str, generation: int) -> SimReplica | None:
        """See Cluster."""
        replica = self.replica_at(name)
        return replica if replica is not None and self._generations[name] == generation else None

    def start(self, name: str) -> None:
        self._generations[name] = self._generations.get(name, 0) + 1
        self._replicas[name] = SimReplica(self, self._shapes[name], self._model, self._generations[name])
        self.world.at(self.world.delay(), self.publish)

    def publish(self) -> None:
        """The controller's member list: the newest build of each replica."""
        self._listed += 1
        members = [
            control.Member(
                identity=pb.ReplicaIdentity(
                    replica_id=name,
                    generation=self._generations[name],
                    role=pb.ROLE_BOTH if self.decodes(name) else pb.ROLE_PREFILL,
                ),
                address=name,
                state=pb.REPLICA_STATE_READY,
            )
            for name in self._shapes
            if name not in self._removed
        ]
        for router in self.routers:
            router.update(control.MemberList(members=members, epoch=b"controller", version=self._listed))

    def kill(self, replica: SimReplica, back_after: float | None) -> None:
        """At once; every connected process detects it. back_after: seconds until its next build; None = never."""
        replica.alive = False
        self.disconnect(replica)
        if back_after is None:
            self._removed.add(replica.name)
            self.world.at(self.world.delay(), self.publish)
        else:
            self.world.at(back_after, lambda: self.start(replica.name))

    # -- clients -----------------------------------------------------------------------------------------------

    def schedule_requests(self, requests: list[ClientRequest]) -> None:
        self.requests_to_come = len(requests)

        def arrive(request: ClientRequest) -> None:
            self.requests_to_come -= 1
            self.router.arrive(request)

        self.router.begin()
        for request in requests:
            self.world.at(request.arrival, partial(arrive, request))

    def submit_now(self, request: ClientRequest) -> None:
        """One more request, now."""
        self.router.arrive(request)

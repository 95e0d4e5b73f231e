"""A router whose member list comes from a simulated controller."""

from typing import TYPE_CHECKING

from headrace_cluster.core.naming import ReplicaName
from headrace_proto import control_pb2 as control
from headrace_router.core.errors import ApiError
from support.simulation.client_request import ClientRequest
from support.simulation.control_link import ControlLink
from support.simulation.sim_request import SimRequest, State
from support.simulation.sim_router import SimRouter

if TYPE_CHECKING:
    from support.simulation.managed_cluster import ManagedCluster

PATIENCE = 60.0  # of production


class ManagedRouter(SimRouter):
    """Ends with the process that started it; its clients lose their connections then."""

    def __init__(self, cluster: "ManagedCluster", name: str, rate: float) -> None:
        super().__init__(cluster, 0.0, name, PATIENCE, rate)
        self.managed = cluster
        self.heard_since: dict[ReplicaName, float] = {}  # builds that it receives from
        self.control = ControlLink(self)
        self.begin()

    def arrive(self, spec: ClientRequest) -> None:
        """The revision is that of the replicas that new requests use; without one the request is rejected."""
        try:
            request = SimRequest(self, spec, self.fleet.card("m"))
        except ApiError as error:
            request = SimRequest(self, spec, "")
            self.requests.append(request)
            request.ended(None, error)
            return
        self.requests.append(request)
        request.run.begin()

    def update(self, members: control.MemberList) -> None:
        self.managed.checks.listed(self, members)
        super().update(members)

    def placed(self, state: State) -> None:
        self.managed.checks.placed(self, state.address)

    def maintain(self) -> None:
        super().maintain()
        heard = {ReplicaName(*state.build) for state in self.fleet.replicas if state.heard}
        now = self.world.now
        self.heard_since = {name: self.heard_since.get(name, now) for name in sorted(heard)}
        self.managed.checks.ready(self)
        self.managed.checks.freed()

    def kill(self) -> None:
        """At once; replicas and controller detect it."""
        self.alive = False
        self.control.close()
        for stream in self.streams:
            stream.disconnect()
        for request in self.requests:
            if not request.outcome:
                request.connection_lost()

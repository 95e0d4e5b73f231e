"""A router: production fleet, policies, rebalancer and choice runs, and clients that check every token."""

from random import Random
from typing import TYPE_CHECKING

from headrace_proto import control_pb2 as control
from headrace_router.core.fleet import Fleet
from headrace_router.core.placement import FleetPlacement
from headrace_router.core.policy import LeastLoad
from headrace_router.core.policy.predicted import LEAST_TOKENS
from support.simulation.sim_link import RouterStream, SimLink
from support.simulation.sim_model import BLOCK
from support.simulation.sim_request import ClientRequest, SimRequest, State

if TYPE_CHECKING:
    from support.simulation.sim_cluster import Cluster

MAINTENANCE_SECONDS = 0.1  # between two checks of all replicas


class SimRouter:
    """Has a link to every build of a replica on its member list."""

    def __init__(
        self, cluster: "Cluster", source_share: float, name: str = "router", patience: float = 5.0, rate: float = 1.0
    ) -> None:
        """patience: seconds that a stream waits for a replica. rate: seconds of its clock per second."""
        self.alive = True
        self.frozen_until = 0.0
        self.name = name
        self.rate = rate
        self.patience = patience
        self.cluster = cluster
        self.world = cluster.world
        self.requests: list[SimRequest] = []
        self.links: list[SimLink] = []
        self.moved = 0  # streams that `SimRequest.move` moved
        self.sources_chosen = 0  # by production's policy
        self.stalled = 0  # attempts that production's maintenance ended on stalled replicas
        self.source_share = source_share
        self.jitter = Random(self.world.seed).random  # of its own: the schedule's draws stay the same
        self.fleet: Fleet[str] = Fleet(self._open, 0, clock=self.clock, jitter=self.jitter)
        self.placement = FleetPlacement(
            self.fleet,
            LeastLoad(),
            clock=self.clock,
            disaggregation="always" if source_share and self.world.seed % 2 else "auto",
            least_disaggregated=2 * BLOCK if source_share else LEAST_TOKENS,  # the prompts of schedules are short
        )
        self._maintaining = False

    def clock(self) -> float:
        return self.world.now * self.rate

    @property
    def streams(self) -> list[RouterStream]:
        return [link.stream for link in self.links if link.stream is not None]

    def begin(self) -> None:
        """Starts the production server's maintenance, which runs while there are clients."""
        if not self._maintaining:
            self._maintaining = True
            self._tick()

    def arrive(self, spec: ClientRequest) -> None:
        request = SimRequest(self, spec)
        self.requests.append(request)
        self.begin()
        request.run.begin()

    def update(self, members: control.MemberList) -> None:
        self.fleet.update(members)

    def placed(self, state: State) -> None:
        """A request is placed on a replica."""

    def _tick(self) -> None:
        self.maintain()
        if self.cluster.busy:
            self.world.at(MAINTENANCE_SECONDS, self._tick, self)
        else:
            self._maintaining = False

    def maintain(self) -> None:
        """As production's server does several times a second."""
        held = {id(attempt) for state in self.fleet.replicas if state.stalled for attempt in state.attempts.values()}
        self.fleet.maintain()
        left = {id(attempt) for state in self.fleet.replicas for attempt in state.attempts.values()}
        self.stalled += len(held - left)
        self.fleet.rebalance(self.clock())

    def _open(self, member: control.Member) -> SimLink:
        return SimLink(self, member)

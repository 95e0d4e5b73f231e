"""Replicas, routers and the connections between them."""

from abc import ABC, abstractmethod

from support.simulation.sim_link import RouterStream
from support.simulation.sim_model import Model
from support.simulation.sim_replica import SimReplica
from support.simulation.sim_request import Phase, SimRequest
from support.simulation.sim_router import SimRouter
from support.simulation.transfer_stream import TransferStream
from support.simulation.transfer_workers import DataNetwork, Disk
from support.simulation.world import InvariantViolation, Network, World

ORPHAN_SECONDS = 1.5
IDLE_SECONDS = 75.0  # by which all answers and faults are over and everything is released


class Cluster(ABC):
    """One seed's cluster; its subclasses start replicas and routers."""

    def __init__(self, world: World, model: Model) -> None:
        self.world = world
        self.data = DataNetwork(world)
        self.disks: dict[tuple[str, int], Disk] = {}  # of ranks, by replica and number
        self.network = Network(world)
        self.streams: list[TransferStream] = []
        self.requests_to_come = 0
        self.routers: list[SimRouter] = []

        self._model = model
        self._replicas: dict[str, SimReplica] = {}
        self._numbers = 0

    @property
    def requests(self) -> list[SimRequest]:
        """Of all routers."""
        return [request for router in self.routers for request in router.requests]

    @property
    def router_streams(self) -> list[RouterStream]:
        """Of all routers."""
        return [stream for router in self.routers for stream in router.streams]

    @property
    def busy(self) -> bool:
        """Whether any client waits for an answer, or any request is still to come."""
        return self.requests_to_come > 0 or any(not request.outcome for request in self.requests)

    # -- replicas ----------------------------------------------------------------------------------------------

    @property
    def replicas(self) -> list[SimReplica]:
        return [replica for replica in self._replicas.values() if replica.alive]

    def replica_at(self, name: str) -> SimReplica | None:
        replica = self._replicas.get(name)
        return replica if replica is not None and replica.alive else None

    @abstractmethod
    def build(self, name: str, generation: int) -> SimReplica | None:
        """This build of a replica, if it is alive."""

    def disconnect(self, replica: SimReplica) -> None:
        """Its process has ended: all its connections are closed."""
        for health_stream in replica.health_streams:
            health_stream.disconnect()
        for stream in self.streams_of(replica):
            stream.disconnect()
        for rank in replica.shards.ranks:
            del self.data.agents[rank.agent]
        for router_stream in self.router_streams:
            if router_stream.replica is replica:
                router_stream.disconnect()

    # -- connections -------------------------------------------------------------------------------------------

    def next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def streams_of(self, replica: SimReplica) -> list[TransferStream]:
        self.streams = [stream for stream in self.streams if not stream.closed]
        return [stream for stream in self.streams if replica in (stream.target, stream.source)]

    # -- clients -----------------------------------------------------------------------------------------------

    def watch(self, replica: SimReplica) -> None:
        """After a replica's turn: checks orphaned grants; disconnects clients in phases that only the replica knows."""
        self._check_grants(replica)
        for request in self.requests:
            if request.replica_name == replica.name and not request.outcome and request.spec.disconnects_in is not None:
                self._watch(replica, request, request.spec.disconnects_in)

    def _check_grants(self, source: SimReplica) -> None:
        """A grant without a fetch at its target ends soon, long before its lease."""
        orphans: dict[tuple[str, int], float] = {}
        for peer, fetch in source.engine.exchange.granter._grants:
            stream = source.targets.get(peer)
            if stream is None or stream.disturbed or stream.target.unhealthy or source.unhealthy:
                continue
            if fetch not in stream.target.engine.exchange.fetcher._fetches:
                since = orphans[peer, fetch] = source.orphans.get((peer, fetch), self.world.now)
                if self.world.now - since > ORPHAN_SECONDS:
                    raise InvariantViolation(f"{source.name} holds a grant for fetch {fetch} of {peer}, which is over")
        source.orphans = orphans

    def _watch(self, replica: SimReplica, request: SimRequest, phase: Phase) -> None:
        attempt = request.attempt
        inside = replica.engine._requests.get(attempt.id) if attempt is not None else None
        if inside is None:
            return
        fetch = next((f for f in replica.engine.exchange.fetcher._fetches.values() if f.request is inside), None)
        current = {
            Phase.QUEUED: fetch is None and inside.row < 0,
            Phase.REQUESTED: fetch is not None and fetch.reserved is None,
            Phase.GRANTED: fetch is not None and fetch.reserved is not None and not fetch.chunks,
            Phase.MOVING: fetch is not None and bool(fetch.chunks),
            Phase.COMMITTED: fetch is not None and any(chunk.committed for chunk in fetch.chunks),
            Phase.PREFILL: inside.row >= 0 and inside.started is not None and not request.tokens,
        }
        if current.get(phase):
            self.world.at(self.world.delay(), lambda: request.disconnect())

    # -- the end -----------------------------------------------------------------------------------------------

    def check_end(self) -> None:
        """When no event is left. Raises InvariantViolation."""
        for request in self.requests:
            if not request.outcome:
                raise InvariantViolation(f"request {request.spec.number} has no outcome")
        if self.requests_to_come:
            raise InvariantViolation("a client was never served")
        for replica in self.replicas:
            if not replica.stopped:
                replica.invariants.idle()

"""A cluster whose replicas are built, watched and ended by production's controller on a simulated Ray."""

from collections.abc import Callable
from functools import partial

from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_worker.core.config import ReplicaStarted
from support.simulation.control_checks import ControlChecks
from support.simulation.managed_router import ManagedRouter
from support.simulation.sim_cluster import Cluster
from support.simulation.sim_controller import SimController, SimKeeper
from support.simulation.sim_model import BLOCK, MAX_MODEL_LEN, Model
from support.simulation.sim_ray import RankProcess, SimNode, SimRay, address_of
from support.simulation.sim_replica import Shape, SimReplica
from support.simulation.sim_request import ClientRequest
from support.simulation.world import World

ROWS = 8
BLOCKS = 64
STEP_SECONDS = 0.08
SERVER_SECONDS = 0.05  # after the end of a loop, until its server has closed
PEER_SECONDS = 0.5  # until a rank detects that another one has ended
VANISHED_SECONDS = 4.0  # the same, if no connection was closed


class ManagedCluster(Cluster):
    """Replicas are found by address: two builds of one may be up."""

    def __init__(
        self, world: World, nodes: list[SimNode], size: int, *, harmless: bool, reaches_replicas: bool
    ) -> None:
        """size: replicas of the spec. harmless, reaches_replicas: see ControlChecks."""
        super().__init__(world, Model((0,), 1))
        self.size = size
        self.managed_routers: list[ManagedRouter] = []
        self.ray = SimRay(world, nodes, self._rank_ended)
        self.checks = ControlChecks(self, harmless=harmless, reaches_replicas=reaches_replicas)
        self.controllers: list[SimController] = []
        self.keeper: SimKeeper | None = None
        self.stopping = False
        self.faults_until = 0.0  # time of the last one
        self._router_numbers = 0

    # -- processes ---------------------------------------------------------------------------------------------

    @property
    def controller(self) -> SimController | None:
        """The newest."""
        return self.controllers[-1] if self.controllers else None

    def fault_later(self, seconds: float, fault: Callable[[], None]) -> None:
        """The recovery of a schedule begins after it."""
        self.faults_until = max(self.faults_until, self.world.now + seconds)
        self.world.at(seconds, fault)

    def add_controller(self, spec: ClusterSpec) -> SimController:
        random = self.world.random
        controller = SimController(self, spec, random.uniform(0.95, 1.05))
        self.controllers.append(controller)
        return controller

    def start_keeper(self, spec: ClusterSpec, routers: int) -> None:
        self.keeper = SimKeeper(self, spec, routers)

    def start_routers(self, count: int) -> None:
        for _ in range(count):
            self._router_numbers += 1
            router = ManagedRouter(self, f"router-{self._router_numbers}", self.world.random.uniform(0.95, 1.05))
            self.managed_routers.append(router)
            self.routers.append(router)

    def end_routers(self) -> None:
        for router in self.live_routers:
            router.kill()

    @property
    def live_routers(self) -> list[ManagedRouter]:
        return [router for router in self.managed_routers if router.alive]

    @property
    def busy(self) -> bool:
        """Heartbeats never end: the schedule does."""
        return True

    # -- replicas ----------------------------------------------------------------------------------------------

    def build(self, name: str, generation: int) -> SimReplica | None:
        return self.replica_at(address_of(ReplicaName(name, generation)))

    def ranks_of(self, build: ReplicaName) -> list[RankProcess]:
        """Those that are alive."""
        return [rank for (name, _), rank in self.ray.ranks.items() if name == build]

    def rank_loaded(self, rank: RankProcess) -> None:
        """The replica is ready when all its ranks are."""
        rank.loaded = True
        ranks = self.ranks_of(rank.build)
        if len(ranks) < rank.config.tp or not all(other.loaded for other in ranks):
            return
        name, config = rank.build, rank.config
        shape = Shape(name.replica_id, 1, 1, BLOCKS, ROWS, 64, 0, STEP_SECONDS, config.revision or "r")
        replica = SimReplica(self, shape, self._model, name.generation)
        replica.address = rank.address
        replica.identity.role = rank.role.number
        self._replicas[replica.address] = replica
        started = ReplicaStarted(
            model="m",
            address=replica.address,
            boot_id=replica.identity.boot_id,
            pid=rank.pid,
            device="cpu",
            dtype="float32",
            revision=shape.revision,
            threads=1,
            tp=config.tp,
            max_model_len=MAX_MODEL_LEN,
            max_num_seqs=ROWS,
            max_num_batched_tokens=64,
            kv_blocks=BLOCKS,
            kv_bytes=1,
            block_size=BLOCK,
            weight_bytes=1,
            notes=[],
        )
        for other in ranks:
            other.started = started
        self.checks.build_up(name)
        self.world.log("{} is up", name)

    def set_role(self, rank: RankProcess) -> None:
        """Its health messages report the role of its rank."""
        replica = self.replica_at(rank.address)
        if replica is not None:
            replica.identity.role = rank.role.number

    def drain(self, rank: RankProcess) -> None:
        """Refuses new attempts."""
        replica = self.replica_at(rank.address)
        if rank.rank == 0 and replica is not None:
            replica.draining = True
            replica.command(lambda exchange: None)

    def stop(self, rank: RankProcess) -> None:
        """Ends the loop of a rank in order."""
        rank.end_loop("it was stopped")
        if rank.rank == 0:
            self._stop_engine(rank)

    def freeze(self, build: ReplicaName, seconds: float) -> None:
        """All processes of a build are stopped for a while."""
        until = self.world.now + seconds
        for rank in self.ranks_of(build):
            rank.frozen_until = max(rank.frozen_until, until)
        replica = self.replica_at(address_of(build))
        if replica is not None:
            if replica.frozen_until <= self.world.now:
                replica.frozen_at = self.world.now
            replica.frozen_until = max(replica.frozen_until, until)

    def _stop_engine(self, rank: RankProcess) -> None:
        replica = self.replica_at(rank.address)
        if replica is not None and not replica.stopped:
            replica.stop()
            self.world.at(SERVER_SECONDS, partial(self._end_engine, replica), replica)

    def _end_engine(self, replica: SimReplica) -> None:
        if replica.alive:
            replica.alive = False
            self.disconnect(replica)

    def _rank_ended(self, rank: RankProcess, cause: str) -> None:
        """A rank's process was killed: the others of its build end, too."""
        self.checks.rank_ended(rank, cause)
        self.world.log("{} ends: {}", rank.name, cause)
        replica = self.replica_at(rank.address)
        if rank.rank == 0 and replica is not None:
            replica.alive = False
            if not rank.vanished:
                self.disconnect(replica)
        for other in self.ranks_of(rank.build):
            seconds = VANISHED_SECONDS if rank.vanished else self.world.random.uniform(0.01, PEER_SECONDS)
            self.world.at(seconds, partial(self._peer_lost, other), other)

    def _peer_lost(self, rank: RankProcess) -> None:
        rank.end_loop("another rank was lost")
        if rank.rank == 0:
            self._stop_engine(rank)

    # -- clients -----------------------------------------------------------------------------------------------

    def schedule_requests(self, requests: list[ClientRequest]) -> None:
        self.requests_to_come = len(requests)
        for request in requests:
            self.world.at(request.arrival, partial(self._arrive, request))

    def _arrive(self, spec: ClientRequest) -> None:
        """At any router; without one the client's connection is refused, and it never becomes a request."""
        self.requests_to_come -= 1
        routers = [router for router in self.live_routers if router.frozen_until <= self.world.now]
        if routers:
            self.world.random.choice(routers).arrive(spec)

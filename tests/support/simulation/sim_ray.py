"""A simulated Ray: nodes with places for ranks, placement groups, named rank processes, and a GCS with a store."""

from collections.abc import Callable
from dataclasses import dataclass, field

from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.rank_config import RankReport, Stage
from headrace_proto.role import Role
from headrace_worker.core.config import ReplicaConfig, ReplicaStarted
from support.simulation.world import World

SECRETS = (b"a fingerprint of the secret",)
PROCESS_SECONDS = (0.1, 1.5)  # to create the process of a rank
DETECT_SECONDS = (0.02, 1.0)  # until Ray reports the end of a process
LOST_NODE_SECONDS = (5.0, 20.0)  # until Ray reports the loss of a node


def address_of(build: ReplicaName) -> str:
    """The address at which a build is reached."""
    return f"{build.replica_id}.g{build.generation}"


class RankProcess:
    """Owns its events. Rank 0 also owns the replica's engine, from its readiness on."""

    def __init__(
        self, world: World, build: ReplicaName, rank: int, config: ReplicaConfig, digest: bytes, pid: int, node: str
    ) -> None:
        self.alive = True
        self.frozen_until = 0.0
        self.build = build
        self.rank = rank
        self.config = config
        self.digest = digest
        self.pid = pid
        self.node = node
        self.answers_from = 0.0  # its process is created
        self.started: ReplicaStarted | None = None
        self.secrets: tuple[bytes, ...] = ()  # fingerprints
        self.loading = False  # or loaded
        self.loaded = False
        self.role = Role(config.role)
        self.drains_until = 0.0
        self.cause: str | None = None  # its loop has ended; the process still exists
        self.lacks_resources = False
        self.vanished = False  # its node was lost: no connection was closed
        self._world = world
        self._reported = False
        self._watchers: list[Callable[[], None]] = []

    @property
    def name(self) -> str:
        return self.build.rank(self.rank)

    @property
    def address(self) -> str:
        """Of its replica, in the network."""
        return address_of(self.build)

    def report(self) -> RankReport:
        """To any controller."""
        return RankReport(
            stage=self._stage,
            pid=self.pid,
            node=self.node,
            gpus=[],
            digest=self.digest,
            secrets=self.secrets,
            model=self.config.model,
            tp=self.config.tp,
            pp=self.config.pp,
            role=str(self.role),
            started=self.started,
            drain_seconds=max(0.0, self.drains_until - self._world.now),
            error=self.cause or "",
            lacks_resources=self.lacks_resources,
        )

    @property
    def _stage(self) -> Stage:
        if self.cause is not None:
            return Stage.ENDED if self.started is not None else Stage.FAILED
        if self.started is not None:
            return Stage.DRAINING if self.drains_until else Stage.READY
        return Stage.STARTING if self.loading else Stage.WAITING

    def watch(self, on_end: Callable[[], None]) -> None:
        """Calls once when Ray reports that the process has ended."""
        if self._reported:
            on_end()
        else:
            self._watchers.append(on_end)

    def end_loop(self, cause: str) -> None:
        """Its loop ends by itself, or because it was stopped."""
        self.cause = self.cause or cause

    def fail(self, cause: str, *, lacks_resources: bool) -> None:
        """Its start fails."""
        self.cause, self.lacks_resources = cause, lacks_resources

    def report_death(self) -> None:
        """Ray reports that the process has ended."""
        self._reported = True
        watchers, self._watchers = self._watchers, []
        for on_end in watchers:
            on_end()


class SimRayError(Exception):
    """Ray does not answer, or the call failed."""


@dataclass(slots=True)
class SimNode:
    """A machine with places for ranks."""

    name: str
    slots: int
    lost: bool = False


@dataclass(slots=True)
class SimGroup:
    """A placement group: all ranks of a build on one node. Ray places it again when its node is lost."""

    name: ReplicaName
    slots: int
    node: SimNode | None = None
    pending: bool = True


@dataclass(slots=True)
class SimRay:
    """State of Ray. The owner passes `ended`, which is called at the end of each rank's process, with the cause."""

    world: World
    nodes: list[SimNode]
    ended: Callable[[RankProcess, str], None]
    groups: dict[ReplicaName, SimGroup] = field(default_factory=dict)
    ranks: dict[tuple[ReplicaName, int], RankProcess] = field(default_factory=dict)  # those that are alive
    names: set[ReplicaName] = field(default_factory=set)  # of all groups that there were
    dying: dict[tuple[ReplicaName, int], RankProcess] = field(default_factory=dict)  # whose end is not known yet
    values: dict[str, bytes] = field(default_factory=dict)
    lease: object = None  # the controller that acts
    silent_until: float = 0.0  # the GCS answers nothing
    failing_until: float = 0.0  # it answers errors
    failing_starts: int = 0  # of the next ranks, that end while they load
    load_seconds: tuple[float, float] = (0.3, 3.0)
    _pids: int = 1000

    # -- the GCS -----------------------------------------------------------------------------------------------

    @property
    def failing(self) -> bool:
        return self.world.now < self.failing_until

    def place(self) -> None:
        """Gives pending groups a place, in the order in which they were created."""
        for group in self.groups.values():
            if group.pending:
                node = next((node for node in self.nodes if self.free(node) >= group.slots), None)
                if node is not None:
                    group.node, group.pending = node, False

    def free(self, node: SimNode) -> int:
        """Slots without a group."""
        used = sum(group.slots for group in self.groups.values() if group.node is node)
        return 0 if node.lost else node.slots - used

    def create_group(self, name: ReplicaName, slots: int) -> SimGroup:
        if name in self.names:
            self.world.fail(f"the number of {name} is used twice")
        self.names.add(name)
        group = self.groups[name] = SimGroup(name, slots)
        self.place()
        return group

    def remove_group(self, name: ReplicaName) -> None:
        """Also ends the ranks in it."""
        if self.groups.pop(name, None) is not None:
            for rank in [rank for (build, _), rank in self.ranks.items() if build == name]:
                self.kill(rank, "its placement group was removed")
            self.place()

    def create_rank(self, name: ReplicaName, rank: int, config: ReplicaConfig, digest: bytes) -> None:
        """Raises SimRayError when its place is lost."""
        group = self.groups.get(name)
        if (name, rank) in self.ranks:
            self.world.fail(f"rank {rank} of {name} is created twice")
        if group is None or group.node is None or group.node.lost:
            raise SimRayError("the node of this rank is lost")
        self._pids += 1
        process = RankProcess(self.world, name, rank, config, digest, self._pids, group.node.name)
        process.answers_from = self.world.now + self.world.random.uniform(*PROCESS_SECONDS)
        self.ranks[name, rank] = process

    # -- ends --------------------------------------------------------------------------------------------------

    def kill(self, rank: RankProcess, cause: str, detect: tuple[float, float] = DETECT_SECONDS) -> None:
        """Ends a process at once; Ray reports it later, and not while its GCS is silent."""
        if not rank.alive:
            return
        rank.alive = False
        self.dying[rank.build, rank.rank] = self.ranks.pop((rank.build, rank.rank))
        self.ended(rank, cause)
        self.world.at(self.world.random.uniform(*detect), lambda: self._report_death(rank))

    def lose(self, node: SimNode) -> None:
        """All its processes end without closing a connection; its groups wait for another place."""
        node.lost = True
        for rank in [rank for rank in self.ranks.values() if rank.node == node.name]:
            rank.vanished = True
            self.kill(rank, "its node was lost", LOST_NODE_SECONDS)
        for group in self.groups.values():
            if group.node is node:
                group.node, group.pending = None, True
        self.place()

    def _report_death(self, rank: RankProcess) -> None:
        if self.world.now < self.silent_until:
            self.world.at(self.silent_until - self.world.now, lambda: self._report_death(rank))
        else:
            del self.dying[rank.build, rank.rank]
            rank.report_death()

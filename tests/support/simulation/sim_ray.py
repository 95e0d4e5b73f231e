"""A simulated Ray: nodes with places for ranks, placement groups, named rank processes, and a GCS with a store."""

from collections.abc import Callable
from dataclasses import dataclass, field

from headrace_cluster.core.naming import ReplicaName
from headrace_worker.core.config import ReplicaConfig
from support.simulation.rank_process import RankProcess
from support.simulation.world import World

PROCESS_SECONDS = (0.1, 1.5)  # to create the process of a rank
DETECT_SECONDS = (0.02, 1.0)  # until Ray reports the end of a process
LOST_NODE_SECONDS = (5.0, 20.0)  # until Ray reports the loss of a node


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

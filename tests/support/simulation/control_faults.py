"""Faults of the control plane: none touches a replica, so that no request may fail."""

from collections.abc import Callable

from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_proto.errors import HeadraceError
from support.simulation.managed_cluster import ManagedCluster
from support.simulation.rank_process import address_of
from support.simulation.sim_operator import SimOperator

BRIEF = (0.3, 1.5, 4.0, 8.0)  # seconds; shorter than a replica may be silent until it is replaced
LONG = (0.5, 3.0, 12.0, 60.0)
LEAVING_TRIES = 160  # of 0.05 s, in which the next build of a rollout is usually up


class ControlFaults:
    """Each fault chooses its target when it starts."""

    def __init__(self, cluster: ManagedCluster, next_spec: Callable[[], ClusterSpec]) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._next_spec = next_spec
        self._operator = SimOperator(cluster)
        self.kinds: list[Callable[[], None]] = [
            self.kill_controller,
            self.kill_controller,
            self.freeze_controller,
            self.silence_gcs,
            self.fail_gcs,
            self.cut_controller_from_replica,
            self.cut_controller_from_all,
            self.cut_next_controller,
            self.cut_controller_from_router,
            self.replace_keeper,
            self.roll,
            self.roll,
            self.roll,
            self.roll_and_lose,
        ]
        self.rollouts: list[Callable[[], None]] = [
            self.roll,
            self.roll_and_lose,
            self.replace_keeper,
            self.kill_controller,
            self.kill_controller,
        ]
        self.operations: list[Callable[[], None]] = [
            self.drain,
            self.drain_and_lose,
            self.drain_and_lose,
            self.roll,
            self.roll_twice,
            self._operator.change_role,
            self.change_roles,
            self.kill_controller,
            self.freeze_controller,
            self.silence_gcs,
            self.fail_gcs,
            self.replace_keeper,
        ]

    def kill_controller(self) -> None:
        controller = self._cluster.controller
        if controller is not None and controller.alive:
            self.log("the controller is killed")
            controller.kill()

    def freeze_controller(self) -> None:
        controller = self._cluster.controller
        if controller is not None:
            controller.frozen_until = self._world.now + self.seconds(LONG, "the controller is stopped")
            self._cluster.checks.controller_frozen(controller.frozen_until)

    def pause_controller(self) -> None:
        """For longer than a replica may be silent, and not so long that it is started again.

        Its timers are over when it goes on; what waits in its sockets is read a moment later.
        """
        controller = self._cluster.controller
        assert controller is not None
        until = controller.frozen_until = self._world.now + self.seconds((2.5, 4.0, 8.0), "the controller is stopped")
        for build in self.builds():
            read_at = until + self._world.random.uniform(0.01, 0.2)
            self._cluster.network.cut(address_of(build), controller.name, read_at)

    def silence_gcs(self) -> None:
        self._cluster.checks.records_lost = True
        self._cluster.ray.silent_until = self._world.now + self.seconds(LONG, "the GCS answers nothing")

    def fail_gcs(self) -> None:
        self._cluster.checks.records_lost = True
        self._cluster.ray.failing_until = self._world.now + self.seconds(BRIEF, "the GCS answers errors")

    def cut_controller_from_replica(self) -> None:
        build = self.choose_build()
        if build is not None:
            self._cut(address_of(build), self.seconds(BRIEF, f"the controller is cut from {build}"))

    def cut_controller_from_all(self) -> None:
        """For a brief or the longest time from all routers, too: then nothing reports to it from which they receive."""
        seconds = self.seconds(LONG, "the controller is cut from all replicas")
        for build in self.builds():
            self._cut(address_of(build), seconds, both=True)
        if seconds in (LONG[0], LONG[-1]):
            for router in self._cluster.live_routers:
                self._cluster.network.cut_both("controller", router.name, self._world.now + seconds)

    def cut_next_controller(self) -> None:
        """It is killed, and the next one does not reach the replicas at first."""
        self.cut_controller_from_all()
        self.kill_controller()

    def cut_controller_from_router(self) -> None:
        routers = self._cluster.live_routers
        if routers:
            router = self._world.random.choice(routers)
            self._cut(router.name, self.seconds(LONG, f"the controller is cut from {router.name}"))

    def replace_keeper(self) -> None:
        """It is killed, with its children; a later one attaches, perhaps with another spec."""
        cluster = self._cluster
        assert cluster.keeper is not None
        if cluster.keeper.alive:
            self.log("the keeper is killed")
            cluster.keeper.kill()
            routers = self._world.random.randrange(1, 3)
            self._world.at(
                self._world.random.uniform(0.5, 4.0), lambda: cluster.start_keeper(self._next_spec(), routers)
            )

    def roll(self) -> None:
        """An operator builds a replica again."""
        controller = self._cluster.controller
        if controller is None or not controller.answers:
            return
        ready = [name for name in controller.planner.wanted if controller.planner.is_ready(name)]
        if ready:
            replica_id = self._world.random.choice(ready)
            self.log(f"{replica_id} is rolled")
            controller.operate("/rollout", {"replicas": [replica_id]}, self._rolled)

    def _rolled(self, error: HeadraceError | None, recorded: bool) -> None:
        self.log(f"the rollout: {error or 'accepted'}{'' if recorded else ', not recorded'}")

    def change_roles(self) -> None:
        """An operator changes roles; the controller is killed meanwhile, or not."""
        for _ in range(self._world.random.randrange(2, 5)):
            self._cluster.fault_later(self._world.random.uniform(0.0, 9.0), self._operator.change_role)
        if self._world.chance(0.5):
            self._cluster.fault_later(self._world.random.uniform(0.0, 15.0), self.kill_controller)

    def roll_twice(self) -> None:
        """Two operators build replicas again at about the same time."""
        self.roll()
        self._cluster.fault_later(self._world.random.choice((0.0, 0.1, 1.0, 4.0)), self.roll)

    def roll_and_lose(self) -> None:
        """The controller is killed about when its record has the rollout, or while the old build drains."""
        self.roll()
        if self._world.chance(0.5):
            self._cluster.fault_later(self._world.random.uniform(0.0, 0.4), self.kill_controller)
        else:
            self._lose_leaving(LEAVING_TRIES)

    def drain(self) -> None:
        """An operator drains a replica."""
        self._operator.drain()

    def drain_and_lose(self) -> None:
        """The controller is killed about when its record has the drain, while it drains, or when it is drained."""
        self.drain()
        self._cluster.fault_later(self._world.random.choice((0.0, 0.02, 0.1, 0.3, 1.0, 4.0)), self.kill_controller)

    def _lose_leaving(self, tries: int) -> None:
        """The controller is killed once an old build drains beside its next one, or not at all."""
        controller = self._cluster.controller
        if controller is not None and any(build.leaving for build in controller.planner.builds.values()):
            self.kill_controller()
        elif tries:
            self._cluster.fault_later(0.05, lambda: self._lose_leaving(tries - 1))

    # -- targets -----------------------------------------------------------------------------------------------

    def builds(self) -> list[ReplicaName]:
        """Those of which a rank is alive."""
        return sorted({name for name, _ in self._cluster.ray.ranks})

    def choose_build(self) -> ReplicaName | None:
        builds = self.builds()
        return self._world.random.choice(builds) if builds else None

    def seconds(self, choices: tuple[float, ...], sentence: str) -> float:
        seconds = self._world.random.choice(choices)
        self.log(f"{sentence} for {seconds} s")
        return seconds

    def log(self, sentence: str) -> None:
        if self._world.tracing:
            self._world.log(f"*** {sentence}")

    def _cut(self, name: str, seconds: float, *, both: bool = False) -> None:
        """Cuts the controller from a process, in a random direction or in both."""
        network, until = self._cluster.network, self._world.now + seconds
        for build in self.builds():
            if address_of(build) == name:
                self._cluster.checks.disturb(build, seconds)
        directions = self._world.random.choice(((0,), (1,), (0, 1)))
        if both or 0 in directions:
            network.cut("controller", name, until)
        if both or 1 in directions:
            network.cut(name, "controller", until)

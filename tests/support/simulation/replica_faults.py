"""Faults of replicas, their nodes, and routers, beside those of the control plane."""

from collections.abc import Callable
from functools import partial

from headrace_cluster.core.naming import ReplicaName
from support.simulation.control_faults import ControlFaults
from support.simulation.managed_cluster import ManagedCluster
from support.simulation.sim_ray import SimNode, address_of
from support.simulation.sim_replica import SimReplica

PAUSES = (0.5, 1.5, 3.0, 8.0, 25.0, 60.0)
MINORITY_PAUSES = (8.0, 25.0, 60.0)  # longer than a new controller asks the ranks
CUTS = (0.5, 3.0, 10.0, 25.0)
LATE_SECONDS = (1.0, 20.0)  # until a node comes in place of a lost one


class ReplicaFaults:
    """Each fault chooses its target when it starts."""

    def __init__(self, cluster: ManagedCluster, control: ControlFaults) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._control = control
        self.kinds: list[Callable[[], None]] = [
            self.kill_rank,
            self.kill_rank,
            self.freeze_replica,
            self.freeze_replica,
            self.freeze_minority,
            self.lose_node,
            self.occupy_places,
            self.fail_starts,
            self.fail_next_build,
            self.slow_starts,
            self.refuse_all,
            self.slow_down,
            self.cut_router_from_replica,
            self.lose_frames,
            self.freeze_router,
        ]
        self.killed_at = 0.0

    def kill_rank(self) -> None:
        ranks = list(self._cluster.ray.ranks.values())
        if ranks:
            self.killed_at = self._world.now
            self._cluster.ray.kill(self._world.random.choice(ranks), "killed")

    def freeze_replica(self) -> None:
        build = self._control.choose_build()
        if build is not None:
            self._freeze(build, self._control.seconds(PAUSES, f"{build} is stopped"))

    def freeze_all(self) -> None:
        """One after the other, for longer than a replica may be silent."""
        for number, build in enumerate(self._control.builds()):
            self._cluster.fault_later(3.0 * number, partial(self._freeze, build, 60.0))

    def freeze_minority(self) -> None:
        """Fewer than half are stopped, the controller is lost, and the next one adopts meanwhile."""
        builds = self._control.builds()
        random = self._world.random
        stopped = random.sample(builds, (len(builds) - 1) // 2) if len(builds) > 2 else []
        for build in stopped:
            self._freeze(build, self._control.seconds(MINORITY_PAUSES, f"{build} is stopped"))
        self._cluster.fault_later(random.choice((0.0, 0.5, 3.0, 10.0)), self._control.kill_controller)

    def _freeze(self, build: ReplicaName, seconds: float) -> None:
        self._cluster.checks.disturb(build, seconds)
        self._cluster.freeze(build, seconds)

    def lose_node(self) -> None:
        """Another one comes later."""
        ray = self._cluster.ray
        nodes = [node for node in ray.nodes if not node.lost]
        if not nodes:
            return
        node = self._world.random.choice(nodes)
        self._world.log(f"*** {node.name} is lost")
        ray.lose(node)
        self._world.at(self._world.random.uniform(*LATE_SECONDS), partial(self._add_node, node.slots))

    def occupy_places(self) -> None:
        """Someone else's work takes what is free on a node, for a while."""
        ray = self._cluster.ray
        node = self._world.random.choice(ray.nodes)
        taken = ray.free(node)
        node.slots -= taken
        self._world.at(
            self._control.seconds(CUTS, f"{taken} places of {node.name} are taken"), partial(self._free, node, taken)
        )

    def fail_starts(self) -> None:
        self._cluster.ray.failing_starts += self._world.random.randrange(1, 4)

    def fail_next_build(self) -> None:
        """Of a rollout; later a replica is lost."""
        self._cluster.ray.failing_starts += 1
        self._control.roll()
        self._cluster.fault_later(8.0, self.kill_rank)

    def slow_starts(self) -> None:
        """Also beyond `start_seconds`."""
        ray, usual = self._cluster.ray, self._cluster.ray.load_seconds
        ray.load_seconds = self._world.random.choice(((6.0, 12.0), (20.0, 35.0)))
        self._world.at(10.0, lambda: setattr(ray, "load_seconds", usual))

    def refuse_all(self) -> None:
        until = self._world.now + self._control.seconds((0.5, 2.0, 6.0), "all replicas refuse")
        for replica in self._cluster.replicas:
            replica.refuses_until = until

    def slow_down(self) -> None:
        """Gradually, and back."""
        replicas = self._cluster.replicas
        if replicas:
            replica = self._world.random.choice(replicas)
            self._world.log(f"*** {replica.address} becomes slow")
            for step, factor in enumerate((1.5, 2.5, 4.0, 6.0, 6.0, 6.0, 1.0)):
                self._world.at(1.5 * step, partial(self._set_slowdown, replica, factor))

    def cut_router_from_replica(self) -> None:
        """In one direction."""
        routers, build = self._cluster.live_routers, self._control.choose_build()
        if routers and build is not None:
            router = self._world.random.choice(routers)
            ends = [router.name, address_of(build)]
            self._world.random.shuffle(ends)
            seconds = self._control.seconds(CUTS, f"nothing arrives from {ends[0]} at {ends[1]}")
            self._cluster.checks.affected.add(router.name)
            self._cluster.network.cut(ends[0], ends[1], self._world.now + seconds)

    def cut_observers(self) -> None:
        """The controller and one router receive nothing from a replica for longer than it may be silent; others do."""
        cluster, build = self._cluster, self._control.choose_build()
        routers, controller = cluster.live_routers, cluster.controller
        if build is None or controller is None or len(routers) < 2:
            return
        until = self._world.now + self._control.seconds((25.0,), f"{build} is cut from its observers")
        cluster.checks.affected.add(routers[0].name)
        cluster.checks.disturb(build, until - self._world.now)
        for observer in (controller.name, routers[0].name):
            cluster.network.cut(address_of(build), observer, until)

    def lose_frames(self) -> None:
        """A frame is lost, and the connection ends; or it arrives twice."""
        streams = self._cluster.router_streams
        if streams:
            stream = self._world.random.choice(streams)
            self._world.log(f"*** the stream to {stream.replica.address} loses a frame, or repeats it")
            stream.message_faults += self._world.random.randrange(1, 3)

    def freeze_router(self) -> None:
        routers = self._cluster.live_routers
        if routers:
            router = self._world.random.choice(routers)
            self._cluster.checks.affected.add(router.name)
            router.frozen_until = self._world.now + self._control.seconds(PAUSES, f"{router.name} is stopped")

    def _add_node(self, slots: int) -> None:
        ray = self._cluster.ray
        ray.nodes.append(SimNode(f"node-{len(ray.nodes)}", slots))
        ray.place()

    def _free(self, node: SimNode, slots: int) -> None:
        node.slots += slots
        self._cluster.ray.place()

    @staticmethod
    def _set_slowdown(replica: SimReplica, factor: float) -> None:
        replica.slowdown = factor

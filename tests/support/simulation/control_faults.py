"""Faults of the control plane, and operators: none touches a replica, so that no request may fail."""

from collections.abc import Callable
from functools import partial

from headrace_base.errors import HeadraceError
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_proto.role import Role
from support.simulation.control_checks import LISTED_SECONDS
from support.simulation.managed_cluster import ManagedCluster
from support.simulation.sim_ray import address_of

Responded = Callable[[HeadraceError | None, bool], None]  # with its error, or whether the next controller would know

BRIEF = (0.3, 1.5, 4.0, 8.0)  # seconds; shorter than a replica may be silent until it is replaced
LONG = (0.5, 3.0, 12.0, 60.0)
LEAVING_TRIES = 160  # of 0.05 s, in which the next build of a rollout is usually up
PATIENCE_SECONDS = 1.0  # for a response, until the call is repeated: its controller may have been lost


class SimOperator:
    """Each call is repeated until one controller has responded to it."""

    def __init__(self, cluster: ManagedCluster) -> None:
        self._cluster = cluster
        self._world = cluster.world
        self._changing: set[str] = set()  # replicas with a call for another role

    def drain(self) -> None:
        """Drains a ready replica, and ends the drain some seconds after the response."""
        controller, checks = self._cluster.controller, self._cluster.checks
        if controller is None or not controller.answers:
            return
        planner = controller.planner
        ready = [name for name, wanted in planner.wanted.items() if planner.is_ready(name) and not wanted.drained]
        free = [replica_id for replica_id in ready if replica_id not in checks.operated]
        if free:
            replica_id = self._world.random.choice(free)
            checks.operated.add(replica_id)
            self._call("/drain", replica_id, partial(self._drained, replica_id))

    def _drained(self, replica_id: str, error: HeadraceError | None, recorded: bool) -> None:
        if error is not None:
            self._cluster.checks.operated.discard(replica_id)
            return
        if recorded:
            self._cluster.checks.drained.add(replica_id)
        self._cluster.fault_later(self._world.random.uniform(0.2, 8.0), lambda: self._undrain(replica_id))

    def change_role(self) -> None:
        """Gives a replica another role; one change of a replica at a time."""
        controller = self._cluster.controller
        if controller is None or not controller.answers:
            return
        free = [replica_id for replica_id in controller.planner.wanted if replica_id not in self._changing]
        if free:
            replica_id, role = self._world.random.choice(free), self._world.random.choice(tuple(Role))
            self._changing.add(replica_id)
            self._cluster.checks.roles[replica_id].add(role)
            self._call("/role", replica_id, partial(self._role_changed, replica_id, role), role=str(role))

    def _role_changed(self, replica_id: str, role: Role, error: HeadraceError | None, recorded: bool) -> None:
        self._changing.discard(replica_id)
        if error is None and recorded:
            self._cluster.checks.roles[replica_id] = {role}

    def _undrain(self, replica_id: str) -> None:
        self._cluster.checks.drained.discard(replica_id)
        # An error: an earlier call, to which no controller responded, ended the drain.
        self._call("/undrain", replica_id, lambda _, recorded: self._await_ready(replica_id, recorded))

    def _await_ready(self, replica_id: str, recorded: bool) -> None:
        """Routers know a little later that it serves again. A drain whose end was not recorded may be back."""
        controller = self._cluster.controller
        wanted = None if controller is None else controller.planner.wanted.get(replica_id)
        if controller is not None and controller.planner.is_ready(replica_id):
            self._cluster.fault_later(LISTED_SECONDS, lambda: self._cluster.checks.operated.discard(replica_id))
        elif wanted is not None and wanted.drained and not recorded:
            self._undrain(replica_id)
        else:
            self._cluster.fault_later(0.5, lambda: self._await_ready(replica_id, recorded))

    def _call(self, path: str, replica_id: str, responded: Responded, **given: str) -> None:
        controller = self._cluster.controller
        if controller is None or not controller.answers:
            self._cluster.fault_later(PATIENCE_SECONDS, lambda: self._call(path, replica_id, responded, **given))
            return
        done = False

        def respond(error: HeadraceError | None, recorded: bool) -> None:
            nonlocal done
            if not done:
                done = True
                self._world.log(
                    f"*** operator: {path} {replica_id}: {error or 'accepted'}{'' if recorded else ', not recorded'}"
                )
                responded(error, recorded)

        def wait() -> None:
            nonlocal done
            if not done and controller.alive:
                self._cluster.fault_later(PATIENCE_SECONDS, wait)
            elif not done:
                done = True
                self._call(path, replica_id, responded, **given)

        self._world.log(f"*** operator: {path} {replica_id} {' '.join(given.values())}")
        controller.operate(path, {"replica": replica_id, **given}, respond)
        self._cluster.fault_later(PATIENCE_SECONDS, wait)


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
            self._operator.drain,
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
            self._world.log("*** the controller is killed")
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
            self._world.log("*** the keeper is killed")
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
            self._world.log(f"*** {replica_id} is rolled")
            controller.operate("/rollout", {"replicas": [replica_id]}, self._rolled)

    def _rolled(self, error: HeadraceError | None, recorded: bool) -> None:
        self._world.log(f"*** the rollout: {error or 'accepted'}{'' if recorded else ', not recorded'}")

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

    def drain_and_lose(self) -> None:
        """The controller is killed about when its record has the drain, while it drains, or when it is drained."""
        self._operator.drain()
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
        self._world.log(f"*** {sentence} for {seconds} s")
        return seconds

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

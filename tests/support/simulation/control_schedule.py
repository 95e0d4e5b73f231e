"""One seed of a cluster with a controller: its faults, its recovery and its stop.

`PYTHONPATH=tests .venv/bin/python -m support.simulation.control_schedule SEED` prints its events;
`… FIRST --until STOP` runs many; `--operated` adds operators.
"""

from collections import Counter
from collections.abc import Callable
from random import Random

from headrace_cluster.spec.cluster_spec import ClusterSpec, parse_spec
from support.simulation.command import replay
from support.simulation.control_checks import FREED_SECONDS
from support.simulation.control_faults import ControlFaults
from support.simulation.managed_cluster import ManagedCluster
from support.simulation.replica_faults import ReplicaFaults
from support.simulation.sim_ray import SimNode
from support.simulation.sim_request import ClientRequest, Phase
from support.simulation.world import World

FIRST_FAULT, LAST_FAULT = 6.0, 18.0
FIRST_REQUEST, LAST_REQUEST = 5.0, 20.0
RECOVERY_SECONDS = 300.0
STOP_SECONDS = 90.0
REPLACED_SECONDS = 30.0  # after its loss, until a replica is replaced
DEADLINE_SECONDS = 1.0  # after its deadline, until a request has ended
SERVED = {"FINISH_LENGTH", "FINISH_DEADLINE", "disconnected", "deadline", "connection lost"}
MAX_EVENTS = 300_000
OPERATED = 5  # the family of faults of a schedule with operators


class ControlSchedule:
    """`run` it once."""

    def __init__(self, seed: int, *, operated: bool = False, tracing: bool = False) -> None:
        """operated: operators change replicas meanwhile; the same seed is another schedule then."""
        self.world = World(seed, tracing=tracing, max_events=MAX_EVENTS)
        random = self.random = self.world.random
        self._family = OPERATED if operated else seed % 5  # of its faults
        self.count = random.choice((1, 2, 2, 3) if self._family != 1 else (1, 1, 2, 3))
        self.ranks = random.choice((1, 1, 1, 2))
        self._revisions = self._changes = 0
        spare = random.choice((0, 1, 1))  # room for a second build
        nodes = [SimNode(f"node-{number}", self.ranks) for number in range(self.count + spare)]
        one_paused = self._family == 4 and self.count == 1
        reached = self._family in (0, 1, OPERATED) or one_paused
        harmless = self._family in (0, 1, 2, OPERATED) or one_paused
        self.cluster = ManagedCluster(self.world, nodes, self.count, harmless=harmless, reaches_replicas=reached)
        self.control_faults = ControlFaults(self.cluster, self.next_spec)
        self.replica_faults = ReplicaFaults(self.cluster, self.control_faults)

    def next_spec(self) -> ClusterSpec:
        """The same replicas, often in another revision."""
        self._revisions += self.random.random() < 0.2
        self._changes += self.random.random() < 0.5
        model = {
            "name": "m",
            "source": "m",
            "device": "cpu",
            "replicas": self.count,
            "tp": self.ranks,
            "revision": f"r{self._revisions}",
            "max_num_seqs": 8 + self._changes,
        }
        health = {"start_seconds": 30, "drain_seconds": 2}
        return parse_spec({"cluster": "simulated", "models": [model], "health": health})

    def run(self) -> Counter[str]:
        """Counts of outcomes by name. Raises InvariantViolation."""
        try:
            return self._run()
        finally:
            for controller in self.cluster.controllers:
                controller.loop.close()

    def _run(self) -> Counter[str]:
        world, cluster = self.world, self.cluster
        kinds = self._plan()
        cluster.start_keeper(self.next_spec(), self.random.randrange(1, 4))
        cluster.schedule_requests(self._requests())
        for kind in kinds:
            world.at(self.random.uniform(FIRST_FAULT, LAST_FAULT), kind)
        world.run(LAST_REQUEST + 1.0)
        self._recover()
        self._stop()
        self._check_requests(only=kinds[0] if len(kinds) == 1 else None)
        outcomes = Counter(request.outcome for request in cluster.requests)
        outcomes["controllers"] = len(cluster.controllers)
        outcomes["routers"] = len(cluster.managed_routers)
        outcomes["builds"] = cluster.checks.builds
        outcomes["events"] = world.events
        return outcomes

    def _plan(self) -> list[Callable[[], None]]:
        """Faults of one family: of the control plane; losses in rollouts; one-way cuts; of all; one; drains."""
        family, count = self._family, self.random.choice((1, 2, 2, 3, 5))
        if family == 0:
            return self.random.choices(self.control_faults.kinds, k=count)
        if family == 1:
            return self.random.choices(self.control_faults.rollouts, k=2 + count)
        if family == OPERATED:
            return self.random.choices(self.control_faults.operations, k=2 + count)
        if family == 2:
            if self.random.random() < 0.3:
                return [self.replica_faults.cut_observers]
            cuts = [self.replica_faults.cut_router_from_replica, self.control_faults.cut_controller_from_replica]
            return self.random.choices(cuts, k=count)
        if family == 4:
            return [self.replica_faults.kill_rank if self.count > 1 else self.control_faults.pause_controller]
        if self.count > 2 and self.random.random() < 0.5:
            return [self.random.choice((self.replica_faults.freeze_all, self.replica_faults.freeze_minority))]
        kinds = self.replica_faults.kinds
        return self.random.choices(kinds + self.random.choice(([], self.control_faults.kinds)), k=count)

    def _check_requests(self, only: Callable[[], None] | None) -> None:
        """No request fails for a fault that touches no replica, or one of several."""
        checks, newest = self.cluster.checks, f"r{self._revisions}"
        if not checks.harmless and not (self.count > 1 and only == self.replica_faults.kill_rank):
            return
        for router in self.cluster.managed_routers:
            failed = [request for request in router.requests if request.outcome not in SERVED]
            if router.name not in checks.affected and any(request.revision == newest for request in failed):
                self.world.fail(f"a request of {router.name} failed: {failed[0].outcome}")
            for request in router.requests if checks.reaches_replicas else ():
                deadline, ended = request.spec.deadline, request.ended_at
                if deadline and ended and ended - request.spec.arrival > deadline + DEADLINE_SECONDS:
                    self.world.fail(f"a request of {router.name} ended long after its deadline")

    def _recover(self) -> None:
        """Until every replica serves as the spec describes it, and every request has ended."""
        until = self.world.now + RECOVERY_SECONDS
        while (missing := self._missing()) and self.world.now < until:
            self.world.run(self.world.now + 1.0)
        if missing:
            self.world.fail(f"{missing} after {RECOVERY_SECONDS:.0f} s without faults")
        if any(controller.words.lost for controller in self.cluster.controllers):
            self.world.fail("a record that is there was taken for lost")
        killed_at = self.replica_faults.killed_at
        if self._family == 4 and killed_at and self.world.now - killed_at > REPLACED_SECONDS:
            self.world.fail(f"the replica that was lost is replaced only after {REPLACED_SECONDS:.0f} s")
        self.world.run(self.world.now + FREED_SECONDS)
        for replica in self.cluster.replicas:
            replica.invariants.idle()

    def _missing(self) -> str:
        cluster = self.cluster
        controller = cluster.controller
        if self.world.now <= cluster.faults_until:
            return "a fault is still to come"
        if self.world.now < cluster.ray.silent_until or cluster.ray.failing:
            return "the GCS does not answer"
        if cluster.requests_to_come or any(not request.outcome for request in cluster.requests):
            return "requests have not ended"
        if controller is None or not controller.alive or controller.frozen or not cluster.live_routers:
            return "there is no controller, or no router"
        planner = controller.planner
        builds = list(planner.builds.values())
        if any(not build.serves for build in builds) or len(builds) != self.count:
            return f"replicas are not ready: {[(build.name, str(build.state), build.cause) for build in builds]}"
        # A build that failed ends the change of its model.
        stopped = any(planner.slots[name].refused == wanted.digest for name, wanted in planner.wanted.items())
        if not stopped and any(build.digest != planner.wanted[build.replica_id].digest for build in builds):
            return "replicas run as an earlier spec describes them"
        names = {build.name for build in builds}
        if names != {name for name, _ in cluster.ray.ranks} or names != set(cluster.ray.groups):
            return f"Ray has {sorted({name for name, _ in cluster.ray.ranks})}, {sorted(cluster.ray.groups)}"
        for build in builds:
            if build.role not in cluster.checks.roles[build.replica_id]:
                return f"{build.name} has the role {build.role}, which no operator gave it"
            if any(rank.role is not build.role for rank in cluster.ranks_of(build.name) if rank.rank == 0):
                return f"the rank of {build.name} has another role"
        for router in cluster.live_routers:
            used = {state.replica_id for state in router.fleet.replicas if state.takes_work and not state.stalled}
            if used != {name.replica_id for name in names}:
                return f"{router.name} does not use all replicas"
        return ""

    def _stop(self) -> None:
        """An orderly stop leaves nothing in Ray."""
        cluster, world = self.cluster, self.world
        cluster.stopping = True
        controller = cluster.controller
        assert controller is not None
        task = controller.stop()
        world.run(world.now + STOP_SECONDS, lambda: task.done() and not (cluster.ray.ranks or cluster.ray.groups))
        if not task.done() or cluster.ray.ranks or cluster.ray.groups:
            world.fail(f"a stop leaves {sorted(cluster.ray.ranks)} and {sorted(cluster.ray.groups)}")
        task.result()

    def _requests(self) -> list[ClientRequest]:
        return [_request(self.random, number) for number in range(self.random.randrange(6, 12))]


def _request(random: Random, number: int) -> ClientRequest:
    return ClientRequest(
        number=number,
        arrival=random.uniform(FIRST_REQUEST, LAST_REQUEST),
        prompt=[random.randrange(10, 900) for _ in range(random.randrange(1, 20))],
        max_tokens=random.choice((4, 10, 25, 50)),
        salt=random.choice((b"", b"tenant")),
        priority=0,
        deadline=random.choice((0.3, 2.0)) if random.random() < 0.05 else None,
        disconnects_in=random.choice((Phase.FIRST_TOKEN, Phase.DECODE)) if random.random() < 0.15 else None,
    )


def run(seed: int, operated: bool = False, tracing: bool = False) -> Counter[str]:
    return ControlSchedule(seed, operated=operated, tracing=tracing).run()


if __name__ == "__main__":
    replay(run, __doc__, "operated")

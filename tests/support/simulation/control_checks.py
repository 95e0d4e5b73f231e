"""What must hold of controller, Ray and routers at every event."""

from collections import defaultdict
from typing import TYPE_CHECKING

from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.replica_build import SERVING, Build
from headrace_proto import control_pb2 as control
from headrace_proto import replica_pb2 as pb
from headrace_proto.role import Role
from support.simulation.sim_ray import RankProcess, address_of

if TYPE_CHECKING:
    from support.simulation.managed_cluster import ManagedCluster
    from support.simulation.managed_router import ManagedRouter
    from support.simulation.sim_controller import SimController

DEAD_SECONDS = 2.8  # after its end, or after the last sign of life, until a replica gets no requests
REPORTED_SECONDS = 4.0  # of reports, until the controller must know what they say
LISTED_SECONDS = 3.0  # after its readiness or a fault, until a build must be listed and ready
FREED_SECONDS = 2.0  # after its client, or its router, has gone, until an attempt is freed


class ControlChecks:
    """Each check ends the schedule; `disturbed` names builds that a fault touched, with the time until it counts."""

    def __init__(self, cluster: "ManagedCluster", *, harmless: bool, reaches_replicas: bool) -> None:
        """harmless: no fault touches a replica, so that none may fail, nor any request.

        reaches_replicas: no fault delays what routers send to replicas.
        """
        self.harmless = harmless
        self.reaches_replicas = reaches_replicas
        self.affected: set[str] = set()  # routers that a fault touched
        self.operated: set[str] = set()  # replicas, from an operator's drain until they are ready again
        self.drained: set[str] = set()  # those of them whose drain was accepted and not ended
        # Those that a replica may have: of the spec, or of the last call that was accepted, and of later ones.
        self.roles: defaultdict[str, set[Role]] = defaultdict(lambda: {Role.BOTH})
        self.records_lost = False  # the GCS did not answer: what a controller could not record is lost with it
        # Builds that were up and not replaced in order: when a controller began to end them, and which one.
        self.stops: dict[ReplicaName, tuple[float, SimController]] = {}
        self._cluster = cluster
        self._world = cluster.world
        self._up: dict[ReplicaName, float] = {}  # builds that were up, since when
        self._ended: dict[str, float] = {}  # addresses of builds, with the time of their end
        self._disturbed: dict[str, float] = {}  # addresses, until when a fault explains silence
        self._all_ready: set[str] = set()  # routers that once had all replicas
        self._orphans: dict[bytes, float] = {}  # attempts at replicas that no router has, since when

    def disturb(self, build: ReplicaName, seconds: float) -> None:
        """A fault of so many seconds makes this build silent to someone."""
        address = address_of(build)
        self._disturbed[address] = max(self._disturbed.get(address, 0.0), self._world.now + seconds)

    def controller_frozen(self, until: float) -> None:
        """It learns only then that a fault is over."""
        for address, end in self._disturbed.items():
            if end > self._world.now - LISTED_SECONDS:
                self._disturbed[address] = max(end, until)

    @property
    def builds(self) -> int:
        """That were up."""
        return len(self._up)

    # -- builds ------------------------------------------------------------------------------------------------

    def build_up(self, name: ReplicaName) -> None:
        """Its ranks are loaded."""
        if name in self._up:
            self._world.fail(f"the number of {name} is used twice")
        if name.replica_id in self.drained:
            self._world.fail(f"{name} is up although an operator drained it")
        newer = [other for other in self._up if other.replica_id == name.replica_id and other > name]
        if newer:
            self._world.fail(f"{name} is up after {newer[0]}")
        self._up[name] = self._world.now
        self._ended.pop(address_of(name), None)

    def rank_ended(self, rank: RankProcess, cause: str) -> None:
        """A rank's process has ended."""
        self._ended.setdefault(rank.address, self._world.now)
        if self.harmless and cause not in ("stopped", "its placement group was removed"):
            self._world.fail(f"{rank.name} ended in a schedule without faults of replicas: {cause}")

    def stopping(self, controller: "SimController", name: ReplicaName) -> None:
        """A controller ends a build: in order, or because it is down, or because no router receives from it."""
        ranks = self._cluster.ranks_of(name)
        up = [rank for rank in ranks if rank.started is not None and rank.cause is None]
        if self._cluster.stopping or not up or len(up) < up[0].config.tp:
            return
        replica = self._cluster.build(name.replica_id, name.generation)
        if replica is None or replica.draining or self._replaced_in_order(controller, name):
            return
        now = self._world.now
        if self.harmless or self._disturbed.get(address_of(name), 0.0) < now - DEAD_SECONDS:
            self._world.fail(f"the controller stops {name}, which is up, and whose silence no fault explains")
        if any(self._receives(router, name) for router in self._cluster.live_routers):
            self._world.fail(f"the controller stops {name}, from which a router receives")
        self.stops.setdefault(name, (now, controller))
        recent = [at for at, by in self.stops.values() if by is controller and now - at < 55.0]
        if len(recent) > controller.spec.health.stops_per_minute:
            self._world.fail("the controller stops more replicas in a minute than it may")

    def draining(self, controller: "SimController", name: ReplicaName) -> None:
        """A controller drains a build to replace it: one at a time, while the others serve."""
        replica = self._cluster.build(name.replica_id, name.generation)
        if not self.harmless or self._cluster.stopping or replica is None or replica.draining:
            return
        serving = {build.replica_id for build in self._up if build != name and self._serves(build)}
        desired = set(controller.planner.wanted)
        replaced = {name.replica_id} if serving - {name.replica_id} else set()
        if missing := desired - serving - self.operated - replaced:
            self._world.fail(f"the controller drains {name} while {sorted(missing)} do not serve")

    def _serves(self, name: ReplicaName) -> bool:
        replica = self._cluster.build(name.replica_id, name.generation)
        return replica is not None and not replica.draining and not replica.stopped

    def _replaced_in_order(self, controller: "SimController", name: ReplicaName) -> bool:
        build = controller.planner.builds.get(name)
        if build is None or (build.made_here and not build.up_since):  # it was never used
            return True
        return build.leave_until is not None or "every router was connected" in build.cause

    def _receives(self, router: "ManagedRouter", name: ReplicaName) -> bool:
        """Whether a router receives from a build, and its reports have arrived, for longer than these count."""
        heard_since = router.heard_since.get(name, self._world.now)
        since = max(heard_since, router.control.connected_since, router.frozen_until)
        return self._world.now - since > REPORTED_SECONDS

    # -- routers -----------------------------------------------------------------------------------------------

    def listed(self, router: "ManagedRouter", members: control.MemberList) -> None:
        """A router receives a list: no build that serves is missing."""
        listed = {member.address for member in members.members}
        unknown = {(m.identity.replica_id, m.identity.generation) for m in members.members if not m.address}
        now = self._world.now
        if max(self._cluster.network.open_at("controller", router.name), router.frozen_until) > now - LISTED_SECONDS:
            return  # lists of an earlier time arrive late
        for name, since in self._up.items():
            replica = self._cluster.build(name.replica_id, name.generation)
            if replica is None or replica.draining or replica.stopped or now - since < LISTED_SECONDS:
                continue
            current = self._known(name)
            serves = current is not None and current.state in SERVING and now - current.since > LISTED_SECONDS
            kept = (name.replica_id, name.generation) in unknown
            if replica.address not in listed and serves and not kept:
                self._world.fail(f"{router.name} receives a list without {name}, which serves")
        for member in members.members:
            disturbed = self._disturbed.get(member.address, 0.0) > now - LISTED_SECONDS
            if self.harmless and member.state == pb.REPLICA_STATE_UNHEALTHY and not disturbed:
                self._world.fail(f"the controller lists {member.address} as unhealthy, which no fault explains")

    def _known(self, name: ReplicaName) -> Build | None:
        controller = self._cluster.controller
        return None if controller is None else controller.planner.builds.get(name)

    def placed(self, router: "ManagedRouter", address: str) -> None:
        """A router places a request: not on a replica that has been dead or frozen for long."""
        now = self._world.now
        replica = self._cluster.replica_at(address)
        if router.frozen_until > now - LISTED_SECONDS:
            return
        if replica is None:
            if now - self._ended.get(address, now) > DEAD_SECONDS:
                self._world.fail(f"{router.name} places a request on {address}, which ended long ago")
            return
        last_frame = max(replica.frozen_at, self._cluster.network.open_at(address, router.name))
        if replica.frozen_until > now and now - last_frame > DEAD_SECONDS:
            self._world.fail(f"{router.name} places a request on {address}, which is frozen")

    def freed(self) -> None:
        """No replica keeps an attempt that no router has: its client or its router has gone, or it has ended."""
        if not self.reaches_replicas:
            return
        routers = self._cluster.live_routers
        known = {attempt for router in routers for state in router.fleet.replicas for attempt in state.attempts}
        running = {
            attempt for replica in self._cluster.replicas if not replica.stopped for attempt in replica.engine._requests
        }
        now = self._world.now
        self._orphans = {attempt: self._orphans.get(attempt, now) for attempt in sorted(running - known)}
        if any(now - since > FREED_SECONDS for since in self._orphans.values()):
            self._world.fail("a replica keeps a request whose client has gone")

    def ready(self, router: "ManagedRouter") -> None:
        """In schedules without faults of replicas: all of them but one serve at every time."""
        if not self.harmless or self._cluster.stopping:
            return
        replicas, count = router.fleet.replicas, self._cluster.size
        ready = {state.replica_id for state in replicas if state.takes_work and not state.stalled}
        served = router.name in self._all_ready - self.affected and ready and not self.records_lost
        if served and not any(state.ready for state in replicas):
            self._world.fail(f"no replica decodes at {router.name}")
        if len(ready) >= count:
            self._all_ready.add(router.name)
        elif router.name in self._all_ready - self.affected and len(ready) < max(1, count - 1 - len(self.operated)):
            self._world.fail(f"only {sorted(ready)} of {count} replicas are ready at {router.name}")

"""The versioned member list that routers watch, and the routers that watch it."""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable

from headrace_cluster.controller.explaining import Explaining
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.planner import Planner
from headrace_cluster.core.replica_build import Build, State
from headrace_cluster.core.router_reports import START_SECONDS, WAIT_SECONDS, RouterReach, RouterReports
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_proto import control_pb2 as pb
from headrace_proto import replica_pb2

PROTO_STATES = {
    State.PENDING: replica_pb2.REPLICA_STATE_STARTING,
    State.STARTING: replica_pb2.REPLICA_STATE_STARTING,
    State.READY: replica_pb2.REPLICA_STATE_READY,
    State.DRAINING: replica_pb2.REPLICA_STATE_DRAINING,
    State.UNHEALTHY: replica_pb2.REPLICA_STATE_UNHEALTHY,
    State.DEAD: replica_pb2.REPLICA_STATE_DEAD,
    State.DRAINED: replica_pb2.REPLICA_STATE_DEAD,
}


class Membership:
    """The current member list and its updates. For one event loop."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._epoch = secrets.token_bytes(16)
        self._list = pb.MemberList(epoch=self._epoch)  # version 0: nothing is known yet; never sent
        self._changed = asyncio.Condition()
        self._clock = clock
        self.routers: dict[str, pb.RouterInfo] = {}  # by id: one that connects again is still one
        self.router_reports = RouterReports()
        self._placements: dict[str, list[pb.ModelPlacement]] = {}  # by router
        self._reach = RouterReach(self.router_reports)
        self.explaining = Explaining(lambda: self.routers)

    def report(self, report: pb.RouterReport) -> None:
        """A router reports from which replicas it receives messages, and accounts that it was asked for."""
        self.explaining.receive(report.router_id, report.accounts)
        self._placements = {key: entries for key, entries in self._placements.items() if key in self.routers}
        self._placements[report.router_id] = list(report.models)
        heard = {ReplicaName(entry.replica_id, entry.generation): entry.heard for entry in report.replicas}
        self.router_reports.report(report.router_id, heard, self._clock())

    def placements(self, router_id: str) -> list[pb.ModelPlacement]:
        """How this router has placed requests, by model, as it last reported."""
        return self._placements.get(router_id, [])

    @property
    def counted_routers(self) -> int:
        """The registered routers without those that have received from no replica for long, while others do."""
        return len(self.routers) - sum(seconds >= WAIT_SECONDS for seconds in self._unreached().values())

    @property
    def unreached(self) -> dict[str, str]:
        """A sentence for each router that receives from no replica while others do, by id."""
        found = (router_id for router_id, seconds in self._unreached().items() if seconds >= START_SECONDS)
        return {
            router_id: f"router {router_id} ({self.routers[router_id].http}) reports no replica from which it receives "
            f"while others do; changes of replicas wait {WAIT_SECONDS:.0f} s for it, then no longer: check its network "
            "and its version, or stop it"
            for router_id in found
        }

    def _unreached(self) -> dict[str, float]:
        now = self._clock()
        self._reach.look(self.routers, now)
        return self._reach.unreached(now)

    async def publish(self, members: Iterable[pb.Member], models: Iterable[pb.ModelEntry]) -> None:
        """Sets the list; a new version is sent only if something changed."""
        fresh = pb.MemberList(epoch=self._epoch, version=self._list.version, members=members, models=models)
        if fresh == self._list and self._list.version:
            return
        fresh.version += 1
        async with self._changed:
            self._list = fresh
            self._changed.notify_all()

    async def watch(self) -> AsyncIterator[pb.MemberList]:
        """The list as soon as there is one, then later versions; a slow reader skips those that it missed."""
        seen = 0
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._list.version != seen)  # noqa: B023
                current = self._list
            seen = current.version
            yield current


def member_list(spec: ClusterSpec, created: int, planner: Planner) -> tuple[list[pb.Member], list[pb.ModelEntry]]:
    """What routers are to know. created: unix seconds, the date of the models in /v1/models.

    A build whose ranks have not replied to this controller yet is listed without an address: routers that receive from
    it keep it.
    """
    members = [found for build in planner.builds.values() if (found := _member(build)) is not None]
    return members, [
        pb.ModelEntry(
            name=model.name,
            aliases=model.aliases,
            created=created,
            revision=model.revision or "",
            drained=_drained(planner, model.name),
        )
        for model in spec.models
    ]


def _member(build: Build) -> pb.Member | None:
    if build.foreign or not (build.silent or build.started):
        return None
    identity = replica_pb2.ReplicaIdentity(replica_id=build.replica_id, generation=build.name.generation)
    started = build.started
    if started is None:
        return pb.Member(identity=identity, state=replica_pb2.REPLICA_STATE_READY)
    identity.boot_id, identity.model, identity.dtype = started.boot_id, started.model, started.dtype
    identity.revision, identity.role = started.revision, build.role.number
    return pb.Member(identity=identity, address=started.address, state=PROTO_STATES[build.state])


def _drained(planner: Planner, model: str) -> bool:
    """Whether an operator drained all replicas of the model that answer requests."""
    found = [wanted.drained for wanted in planner.wanted.values() if wanted.model.name == model and wanted.role.decodes]
    return bool(found) and all(found)

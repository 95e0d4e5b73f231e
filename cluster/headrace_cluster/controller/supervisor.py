"""Executes the reconciler's decisions: one task per build of a replica, one loop with a tick."""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

import structlog

from headrace_cluster.controller.build import Build
from headrace_cluster.controller.draining import Drains
from headrace_cluster.controller.health import STATES, watch_health
from headrace_cluster.controller.members import PROTO_STATES, Membership
from headrace_cluster.controller.profiles import Profiles
from headrace_cluster.controller.roles import Roles
from headrace_cluster.controller.status import build_status, replica_status, router_status
from headrace_cluster.core.adoption import restore_records, take_snapshot
from headrace_cluster.core.driver import (
    PLACE_SECONDS,
    Progress,
    RankFacts,
    ReplicaDriver,
    StartFailedError,
)
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.reconciler import Reconciler, desired_replicas
from headrace_cluster.core.record import Launch, Record, State, Stop
from headrace_cluster.core.snapshot import ControllerSnapshot
from headrace_cluster.errors import PlacementError
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_proto import control_pb2, replica_pb2
from headrace_proto.errors import HeadraceError
from headrace_worker.core.config import ReplicaStarted

log = structlog.get_logger(__name__)

TICK_SECONDS = 0.2
CLEANUP_SECONDS = 1.0  # for the other ranks of a build that failed: one may be stopped and not reply
PROGRESS_SECONDS = 0.5
SURGE_PLACE_SECONDS = 5.0  # to place a second build of a replica: waiting longer frees no resources
FIRST_HEALTH_SECONDS = 5.0  # for adopted replicas to send health before the first member list is published


class Supervisor:
    """Keeps a driver's replicas as the spec describes them. For one event loop."""

    def __init__(
        self,
        spec: ClusterSpec,
        driver: ReplicaDriver,
        membership: Membership,
        secret: bytes,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._spec = spec
        self._driver = driver
        self._membership = membership
        self._secret = secret
        self._clock = clock
        self._created = int(time.time())
        self._withhold_until = 0.0  # the member list, while adopted replicas have sent no health
        self._builds: dict[ReplicaName, Build] = {}
        self._background: set[asyncio.Task[None]] = set()
        # Held to place a build or to end one, never while it drains. A build that failed is ended before the next one
        # of its replica is placed: both need the same memory.
        self._place_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self.reconciler = Reconciler(desired_replicas(spec), spec.health)
        self.profiles = Profiles(self.reconciler, driver, self._builds)
        self.roles = Roles(self.reconciler, driver, self._publish)
        self.drains = Drains(self.reconciler, spec.health.drain_seconds, clock, self._wake.set)

    async def adopt(self, snapshot: ControllerSnapshot | None) -> None:
        """Takes over from an earlier controller of this cluster. Call it before `start`."""
        adopted_state = await self._driver.adopt(self.reconciler.desired)
        self.drains.resume(restore_records(self.reconciler, snapshot, adopted_state, self._clock()))
        self._created = snapshot.created if snapshot is not None else self._created
        for adopted in adopted_state.builds:
            build = self._builds[adopted.name] = Build(adopted.ranks, adopted.started)
            self._spawn(adopted.name, self._watch_build(adopted.name, build))
        self._withhold_until = self._clock() + FIRST_HEALTH_SECONDS

    def snapshot(self) -> ControllerSnapshot:
        """For the next controller."""
        return take_snapshot(self.reconciler, self._created, self.drains.remaining())

    def start(self) -> None:
        """Starts the reconcile loop."""
        self._loop = asyncio.create_task(self._run())
        self._loop.add_done_callback(self._done)

    async def stop(self) -> None:
        """Drains and ends every replica, then stops reconciling."""
        self.reconciler.set_desired(())
        self.drains.cap_deadlines()
        self._wake.set()
        if self._loop is not None and not self._loop.done():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._spec.health.drain_seconds + 10):
                    await self._idle.wait()
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        for name, build in list(self._builds.items()):  # those that a drain did not end in time
            for task in build.tasks:
                task.cancel()
            await self._driver.stop(name)

    # -- state for readers ------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The document that `headrace status --json` prints."""
        now = self._clock()
        replicas, surges = [], self.reconciler.surges
        for record in self.reconciler.records.values():
            build = self._builds.get(record.name, Build())
            note = self.drains.note(record) or self.reconciler.crash_loop(record, now) or record.cause
            note = note or self._stage(record)
            others = ((other, self._builds.get(other.name, Build())) for other in surges.builds_of(record))
            beside = [build_status(other, known.health, self._stage(other)) for other, known in others]
            failed = surges.failed.get(record.replica_id, "")
            replicas.append(replica_status(record, build.ranks, build.health, note, beside, failed))
        known = sorted(self._membership.routers.values(), key=lambda router: router.metrics)
        routers = [router_status(router) for router in known]
        return {"replicas": replicas, "routers": routers}

    def _stage(self, record: Record) -> str:
        progress = self._builds.get(record.name, Build()).progress
        return progress.stage if progress is not None and record.state is State.STARTING else ""

    def started(self) -> dict[str, ReplicaStarted]:
        """Facts of the replicas that are up, by id."""
        return {name.replica_id: build.started for name, build in self._builds.items() if build.started is not None}

    @property
    def in_flight(self) -> int:
        """Requests that replicas run or queue, builds that drain beside their next one included."""
        loads = [build.health.load for build in self._builds.values() if build.health is not None and not build.ended]
        return sum(load.running + load.waiting for load in loads)

    def progress(self) -> dict[str, Progress]:
        """Progress of starting replicas, by id."""
        return {
            record.replica_id: self._builds[record.name].progress or Progress("waiting for a place", 0.0)
            for record in self.reconciler.records.values()
            if record.state is State.STARTING and record.name in self._builds
        }

    # -- the loop ---------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._idle.clear()
            self._wake.clear()  # before the pass: a change during it starts the next pass without a wait
            for action in self.reconciler.actions(self._clock()):
                match action:
                    case Launch(name):
                        log.info("a build starts", replica=name.replica_id, generation=name.generation)
                        self._builds[name] = Build()
                        self._spawn(name, self._run_build(action))
                    case Stop(name, drain):
                        if not drain:
                            for task in self._builds.get(name, Build()).tasks:
                                task.cancel()
                        self._keep_reference(asyncio.create_task(self._end(name, drain)))
            self.drains.discard_failed()
            await self._publish()
            if self.reconciler.idle:
                self._idle.set()
            try:
                async with asyncio.timeout(TICK_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _run_build(self, launch: Launch) -> None:
        """One build: place, start, watch until it ends."""
        name, build = launch.name, self._builds[launch.name]
        try:
            async with self._place_locks[name.replica_id]:
                seconds = SURGE_PLACE_SECONDS if launch.beside else PLACE_SECONDS
                build.ranks = await self._driver.launch(name, launch.model, launch.role, seconds)
            poll = asyncio.create_task(self._poll_progress(name, build))
            try:
                build.started = await self._driver.start(name)
            finally:
                poll.cancel()
        except HeadraceError as error:
            final = error.final if isinstance(error, StartFailedError) else True
            log.error(str(error), replica=name.replica_id, generation=name.generation)
            lacks_resources = isinstance(error, PlacementError) or (
                isinstance(error, StartFailedError) and error.lacks_resources
            )
            await self._clean_up(name)
            self.reconciler.start_failed(name, str(error), self._clock(), final=final, lacks_resources=lacks_resources)
            self._wake.set()
            return
        device = build.started.device
        build.ranks = [RankFacts(r.rank, r.pid, r.node, r.device or device) for r in build.ranks]
        await self._watch_build(name, build)

    async def _watch_build(self, name: ReplicaName, build: Build) -> None:
        """Watches a build that is up until it ends by itself."""
        assert build.started is not None
        on_health = self._health_receiver(name, build)
        self._spawn(name, watch_health(build.started.address, self._secret, self._spec.health, on_health))
        cause = await self._driver.wait_for_death(name)
        build.ended = True
        log.warning(cause, replica=name.replica_id, generation=name.generation)
        self.reconciler.died(name, cause, self._clock())
        self._wake.set()
        # No await before this: the lock is first come, first served, and the next build waits for it, too.
        async with self._place_locks[name.replica_id]:
            await self._clean_up(name)

    async def _poll_progress(self, name: ReplicaName, build: Build) -> None:
        while True:
            build.progress = await self._driver.progress(name) or build.progress
            await asyncio.sleep(PROGRESS_SECONDS)

    def _health_receiver(self, name: ReplicaName, build: Build) -> Callable[[replica_pb2.ReplicaHealth], None]:
        def receive(health: replica_pb2.ReplicaHealth) -> None:
            before = build.health
            build.health = health
            state = STATES.get(health.state, State.UNHEALTHY)
            step_seconds = health.load.predicted_step_ms / 1e3
            connected = health.routers >= len(self._membership.routers)
            self.reconciler.health_received(name, state, step_seconds, self._clock(), connected=connected)
            if before is None or before.state != health.state:
                log.info(str(state), replica=name.replica_id, generation=name.generation)
                self._wake.set()

        return receive

    async def _clean_up(self, name: ReplicaName) -> None:
        """Ends the remaining parts of a build that failed: other ranks, placement group, watchers."""
        build = self._builds.pop(name, Build())
        for task in build.tasks - {asyncio.current_task()}:
            task.cancel()
        await self._driver.stop(name, CLEANUP_SECONDS)
        self._wake.set()

    async def _end(self, name: ReplicaName, drain: bool) -> None:
        if drain:
            await self._driver.drain(name)
            await self.drains.wait_until_empty(name, self._builds.get(name, Build()))
        async with self._place_locks[name.replica_id]:
            build = self._builds.pop(name, Build())
            for task in build.tasks:
                task.cancel()
            await self._driver.stop(name)
            self.reconciler.stopped(name, self._clock())
        self._wake.set()

    async def _publish(self) -> None:
        incomplete = any(build.started is not None and build.health is None for build in self._builds.values())
        if incomplete and self._clock() < self._withhold_until:
            return  # routers keep the previous controller's list: an incomplete one would remove replicas that are up
        members = []
        for record in self.reconciler.builds():
            build = self._builds.get(record.name)
            if build is None or build.started is None or build.health is None:
                continue
            state = PROTO_STATES[record.state]
            member = control_pb2.Member(identity=build.health.identity, address=build.started.address, state=state)
            member.identity.role = record.role.number  # a health message may be older than the last flip
            members.append(member)
        models = [
            control_pb2.ModelEntry(
                name=model.name, aliases=model.aliases, created=self._created, revision=model.revision or ""
            )
            for model in self._spec.models
        ]
        await self._membership.publish(members, models)

    def _spawn(self, name: ReplicaName, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        build = self._builds[name]
        build.tasks.add(task)
        task.add_done_callback(build.tasks.discard)
        self._keep_reference(task)

    def _keep_reference(self, task: asyncio.Task[None]) -> None:
        # asyncio itself has only weak references to tasks.
        self._background.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # After a bug of ours the cluster must end: parts of it are no longer watched.
            log.error("the controller failed", exc_info=error)
            self.reconciler.fatal = self.reconciler.fatal or f"the controller failed: {error!r}"

"""Carries out what the reconciler decides: one task per build of a replica, one tick that looks at the clock."""

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

from headrace_cluster.controller.adoption import recall, remember
from headrace_cluster.controller.build import Build
from headrace_cluster.controller.draining import Drains
from headrace_cluster.controller.driver import Progress, RankFacts, ReplicaDriver, StartFailedError
from headrace_cluster.controller.health import watch_health
from headrace_cluster.controller.members import Membership
from headrace_cluster.controller.memory import ControllerMemory
from headrace_cluster.controller.reconciler import Launch, Reconciler, Record, State, Stop, desired_replicas
from headrace_cluster.controller.roles import ROLE_NUMBERS, Roles
from headrace_cluster.controller.status import profile_document, replica_status, router_status
from headrace_cluster.errors import ProfileError
from headrace_cluster.naming import ReplicaName
from headrace_cluster.spec import ClusterSpec
from headrace_proto import control_pb2, replica_pb2
from headrace_proto.errors import HeadraceError
from headrace_worker.config import ReplicaStarted

TICK_SECONDS = 0.2
BURY_SECONDS = 1.0  # for the ranks that are left of a build that failed: one may be stopped, and hear nothing
PROGRESS_SECONDS = 0.5
QUIET_SECONDS = 5.0  # for replicas that were adopted to say how they are, before routers hear from this controller

_STATES = {
    replica_pb2.REPLICA_STATE_STARTING: State.STARTING,
    replica_pb2.REPLICA_STATE_READY: State.READY,
    replica_pb2.REPLICA_STATE_DRAINING: State.DRAINING,
    replica_pb2.REPLICA_STATE_UNHEALTHY: State.UNHEALTHY,
    replica_pb2.REPLICA_STATE_DEAD: State.UNHEALTHY,
}
_PROTO_STATES = {
    State.STARTING: replica_pb2.REPLICA_STATE_STARTING,
    State.READY: replica_pb2.REPLICA_STATE_READY,
    State.DRAINING: replica_pb2.REPLICA_STATE_DRAINING,
    State.UNHEALTHY: replica_pb2.REPLICA_STATE_UNHEALTHY,
    State.DEAD: replica_pb2.REPLICA_STATE_DEAD,
    State.DRAINED: replica_pb2.REPLICA_STATE_DEAD,
}


class Supervisor:
    """Keeps a driver's replicas as the spec wants them. Of one event loop."""

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
        self._quiet_until = 0.0
        self._builds: dict[ReplicaName, Build] = {}
        self._background: set[asyncio.Task[None]] = set()
        # The next build of a replica begins after the last one is gone: they want the same memory.
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self.reconciler = Reconciler(desired_replicas(spec), spec.health)
        self.roles = Roles(self.reconciler, driver, self._publish)
        self.drains = Drains(self.reconciler, spec.health.drain_seconds, clock, self._wake.set)

    async def adopt(self, memory: ControllerMemory | None) -> None:
        """Takes over from an earlier controller of this cluster. Before `start`."""
        inheritance = await self._driver.adopt(self.reconciler.desired)
        self.drains.resume(recall(self.reconciler, memory, inheritance, self._clock()))
        self._created = memory.created if memory is not None else self._created
        for adopted in inheritance.builds:
            build = self._builds[adopted.name] = Build(adopted.ranks, adopted.started)
            self._spawn(adopted.name, self._attend(adopted.name, build))
        self._quiet_until = self._clock() + QUIET_SECONDS

    def memory(self) -> ControllerMemory:
        """For the controller after this one."""
        return remember(self.reconciler, self._created, self.drains.left())

    def start(self) -> None:
        """Begins to reconcile."""
        self._loop = asyncio.create_task(self._run())
        self._loop.add_done_callback(self._done)

    async def stop(self) -> None:
        """Drains and ends every replica, then stops reconciling."""
        self.reconciler.set_desired(())
        self.drains.hurry()
        self._wake.set()
        if self._loop is not None and not self._loop.done():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._spec.health.drain_seconds + 10):
                    await self._idle.wait()
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        for name, build in list(self._builds.items()):  # whatever a drain did not end in time
            for task in build.tasks:
                task.cancel()
            await self._driver.stop(name)

    # -- what others read -------------------------------------------------------------------------------------

    def status(self) -> dict[str, Any]:
        """The document that `headrace status --json` prints."""
        now = self._clock()
        replicas = []
        for record in self.reconciler.records.values():
            build = self._builds.get(record.name, Build())
            note = self.drains.note(record) or self.reconciler.crash_loop(record, now) or record.cause
            if not note and record.state is State.STARTING and build.progress is not None:
                note = build.progress.stage
            replicas.append(replica_status(record, build.ranks, build.health, note))
        routers = [router_status(router) for router in self._membership.routers.values()]
        return {"replicas": replicas, "routers": routers}

    def started(self) -> dict[str, ReplicaStarted]:
        """Facts of the replicas that are up, by id."""
        return {name.replica_id: build.started for name, build in self._builds.items() if build.started is not None}

    def progress(self) -> dict[str, Progress]:
        """How far starting replicas are, by id."""
        return {
            record.replica_id: self._builds[record.name].progress or Progress("waiting for a place", 0.0)
            for record in self.reconciler.records.values()
            if record.state is State.STARTING and record.name in self._builds
        }

    async def profile(self, replica_id: str | None, steps: int, seconds: float) -> dict[str, Any]:
        """Has every rank of a replica, or of the only one, record its next steps: where the traces lie.

        The document that POST /profile answers. Raises ProfileError.
        """
        record = self._chosen(replica_id)
        build = self._builds.get(record.name)
        if build is None or build.started is None:
            raise ProfileError(f"{record.replica_id} is {record.state}: ask again when it is ready")
        outcomes = await self._driver.profile(record.name, steps, seconds)
        if not any(outcome.report is not None for outcome in outcomes):
            raise ProfileError(next((outcome.error for outcome in outcomes), f"{record.replica_id} has just ended"))
        return profile_document(record.name, build.ranks, outcomes)

    def _chosen(self, replica_id: str | None) -> Record:
        records = self.reconciler.records
        names = ", ".join(records)
        if replica_id is None:
            if len(records) != 1:
                raise ProfileError(f"which replica? Name one of: {names}")
            return next(iter(records.values()))
        if replica_id not in records:
            raise ProfileError(f"there is no replica {replica_id!r}; there are: {names}")
        return records[replica_id]

    # -- the loop ---------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._idle.clear()
            for action in self.reconciler.actions(self._clock()):
                match action:
                    case Launch(name):
                        self._builds[name] = Build()
                        self._spawn(name, self._live(action))
                    case Stop(name, drain):
                        if not drain:
                            for task in self._builds.get(name, Build()).tasks:
                                task.cancel()
                        self._keep(asyncio.create_task(self._end(name, drain)))
            await self._publish()
            if self.reconciler.idle:
                self._idle.set()
            self._wake.clear()
            try:
                async with asyncio.timeout(TICK_SECONDS):
                    await self._wake.wait()
            except TimeoutError:
                continue

    async def _live(self, launch: Launch) -> None:
        """The life of one build: placed, started, watched, dead."""
        name, build = launch.name, self._builds[launch.name]
        try:
            async with self._turns[name.replica_id]:
                build.ranks = await self._driver.launch(name, launch.model, launch.role)
            poll = asyncio.create_task(self._poll_progress(name, build))
            try:
                build.started = await self._driver.start(name)
            finally:
                poll.cancel()
        except HeadraceError as error:
            final = error.final if isinstance(error, StartFailedError) else True
            await self._bury(name)
            self.reconciler.start_failed(name, str(error), self._clock(), final=final)
            self._wake.set()
            return
        device = build.started.device
        build.ranks = [RankFacts(r.rank, r.pid, r.node, r.device or device) for r in build.ranks]
        await self._attend(name, build)

    async def _attend(self, name: ReplicaName, build: Build) -> None:
        """The life of a build that is up, until it ends by itself."""
        assert build.started is not None
        self._spawn(name, watch_health(build.started.address, self._secret, self._spec.health, self._hear(name, build)))
        cause = await self._driver.died(name)
        build.ended = True
        async with self._turns[name.replica_id]:
            self.reconciler.died(name, cause, self._clock())
            await self._publish()
            await self._bury(name)

    async def _poll_progress(self, name: ReplicaName, build: Build) -> None:
        while True:
            build.progress = await self._driver.progress(name) or build.progress
            await asyncio.sleep(PROGRESS_SECONDS)

    def _hear(self, name: ReplicaName, build: Build) -> Callable[[replica_pb2.ReplicaHealth], None]:
        def hear(health: replica_pb2.ReplicaHealth) -> None:
            before = build.health
            build.health = health
            state = _STATES.get(health.state, State.UNHEALTHY)
            self.reconciler.heard(name, state, health.load.predicted_step_ms / 1e3, self._clock())
            if before is None or before.state != health.state:
                self._wake.set()

        return hear

    async def _bury(self, name: ReplicaName) -> None:
        """Ends what is left of a build that failed: its other ranks, its place, its watchers."""
        build = self._builds.pop(name, Build())
        for task in build.tasks - {asyncio.current_task()}:
            task.cancel()
        await self._driver.stop(name, BURY_SECONDS)
        self._wake.set()

    async def _end(self, name: ReplicaName, drain: bool) -> None:
        async with self._turns[name.replica_id]:
            if drain:
                await self._driver.drain(name)
                await self.drains.emptied(name, self._builds.get(name, Build()))
            build = self._builds.pop(name, Build())
            for task in build.tasks:
                task.cancel()
            await self._driver.stop(name)
            self.reconciler.stopped(name, self._clock())
        self._wake.set()

    async def _publish(self) -> None:
        unheard = any(build.started is not None and build.health is None for build in self._builds.values())
        if unheard and self._clock() < self._quiet_until:
            return  # routers keep the list of the controller before, rather than learn that nobody is there
        members = []
        for record in self.reconciler.records.values():
            build = self._builds.get(record.name)
            if build is None or build.started is None or build.health is None:
                continue
            state = _PROTO_STATES[record.state]
            member = control_pb2.Member(identity=build.health.identity, address=build.started.address, state=state)
            member.identity.role = ROLE_NUMBERS[record.role]  # a health message may be older than the last flip
            members.append(member)
        models = [
            control_pb2.ModelEntry(name=model.name, aliases=model.aliases, created=self._created)
            for model in self._spec.models
        ]
        await self._membership.publish(members, models)

    def _spawn(self, name: ReplicaName, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        build = self._builds[name]
        build.tasks.add(task)
        task.add_done_callback(build.tasks.discard)
        self._keep(task)

    def _keep(self, task: asyncio.Task[None]) -> None:
        # asyncio holds tasks weakly.
        self._background.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A bug of ours must not leave the cluster half watched.
            self.reconciler.fatal = self.reconciler.fatal or f"the controller failed: {error!r}"

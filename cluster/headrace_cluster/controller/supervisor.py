"""Executes the reconciler's decisions: one task per build of a replica, one loop with a tick."""

import asyncio
import contextlib
import random
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import structlog

from headrace_cluster.controller.background_tasks import BackgroundTasks
from headrace_cluster.controller.build import Build
from headrace_cluster.controller.draining import Drains
from headrace_cluster.controller.health import HealthWatch
from headrace_cluster.controller.health_receivers import HealthReceivers
from headrace_cluster.controller.members import Membership
from headrace_cluster.controller.overview import Overview
from headrace_cluster.controller.profiles import Profiles
from headrace_cluster.controller.publisher import Publisher
from headrace_cluster.controller.repeated_calls import RepeatedCalls
from headrace_cluster.controller.retries import Retries
from headrace_cluster.controller.roles import Roles
from headrace_cluster.core.adoption import restore_late, restore_records, take_snapshot
from headrace_cluster.core.desired import desired_replicas
from headrace_cluster.core.driver import Progress, RankFacts, ReplicaDriver, StartFailedError
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.pauses import Pauses
from headrace_cluster.core.reconciler import Reconciler
from headrace_cluster.core.record import Action, Launch, State, Stop
from headrace_cluster.core.snapshot import ControllerSnapshot
from headrace_cluster.errors import PlacementError
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_proto.errors import HeadraceError

log = structlog.get_logger(__name__)

TICK_SECONDS = 0.2
CLEANUP_SECONDS = 1.0  # for the other ranks of a build that failed: one may be stopped and not reply
SURGE_PLACE_SECONDS = 5.0  # to place a second build of a replica: waiting longer frees no resources


class Supervisor:
    """Keeps a driver's replicas as the spec describes them. For one event loop."""

    def __init__(
        self,
        spec: ClusterSpec,
        driver: ReplicaDriver,
        membership: Membership,
        watch: HealthWatch,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._spec = spec
        self._driver = driver
        self._membership = membership
        self._watch = watch
        self._clock = clock
        self._builds: dict[ReplicaName, Build] = {}
        self._ending: set[ReplicaName] = set()
        self.retries = Retries(clock, jitter)
        self._repeated = RepeatedCalls(driver, self.retries)
        self._background = BackgroundTasks(self.retries.note)
        self._passed_at = clock()
        self._pauses = Pauses()
        self._failing = False  # whether the last pass of the reconcile loop failed
        # Held to place a build or to end one, never while it drains. A build that failed is ended before the next one
        # of its replica is placed: both need the same memory.
        self._place_locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._loop: asyncio.Task[None] | None = None
        self.reconciler = Reconciler(desired_replicas(spec), spec.health, membership.router_reports)
        self._health = HealthReceivers(
            self.reconciler,
            self._builds,
            membership,
            spec.health.silence_seconds,
            clock,
            self._wake.set,
            self._check_role,
        )
        self.profiles = Profiles(self.reconciler, driver, self._builds)
        self._publisher = Publisher(spec, self.reconciler, self._builds, membership, int(time.time()))
        self.roles = Roles(self.reconciler, driver, self._publisher.publish, clock, jitter)
        self.drains = Drains(self.reconciler, spec.health.drain_seconds, clock, self._wake.set, membership)
        self.overview = Overview(self.reconciler, self._builds, membership, self.drains, self.retries, clock)

    async def adopt(self, snapshot: ControllerSnapshot | None) -> int:
        """Takes over from an earlier controller of this cluster; returns the number of its builds that continue.

        Call it before `start`. Raises AdoptionError.
        """
        adopted_state = await self._driver.adopt(self.reconciler.desired, snapshot)
        self.drains.resume(restore_records(self.reconciler, snapshot, adopted_state, self._clock()))
        self.overview.found_problems = adopted_state.problems
        if snapshot is not None:
            self._publisher.created = snapshot.created
        for adopted in adopted_state.builds:
            build = self._builds[adopted.name] = Build(adopted.ranks, adopted.started, adopted.reports)
            self._spawn(adopted.name, self._watch_build(adopted.name, build))
        for name in adopted_state.silent:
            build = self._builds[name] = Build()
            self._spawn(name, self._await_reply(name, build))
        for name in adopted_state.starting:
            self._builds[name] = Build()
            self._spawn(name, self._run_build(name))
        return len(adopted_state.builds)

    def snapshot(self) -> ControllerSnapshot:
        """For the next controller."""
        reports = {name: build.reports for name, build in self._builds.items() if not build.ended}
        return take_snapshot(self.reconciler, self._publisher.created, self.drains.remaining(), reports)

    def start(self) -> None:
        """Starts the reconcile loop."""
        self._passed_at = self._clock()
        self._loop = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Drains and ends every replica, then stops reconciling. What cannot be ended now is ended by name later."""
        self.reconciler.set_desired(())
        self.drains.cap_deadlines()
        self._wake.set()
        if self._loop is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._spec.health.drain_seconds + 10):
                    await self._idle.wait()
            self._loop.cancel()
            await asyncio.gather(self._loop, return_exceptions=True)
        for name, build in list(self._builds.items()):  # those that a drain did not end in time
            build.cancel_tasks()
            try:
                await self._driver.stop(name)
            except Exception as error:
                log.error("a build could not be ended", exc_info=error, replica=name.replica_id)

    def status(self) -> dict[str, Any]:
        """The document that `headrace status --json` prints."""
        return self.overview.status()

    def send_secret(self) -> None:
        """It has changed: every build that is up gets it soon; connections are not affected."""
        for name, build in self._builds.items():
            if build.started is not None:
                self._spawn(name, self._repeated.send_secret(name))

    # -- the loop ---------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._wake.clear()  # before the pass: a change during it starts the next pass without a wait
            await self.retries.run("a pass over all replicas", self._pass)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_SECONDS):
                    await self._wake.wait()

    async def _pass(self) -> None:
        """Executes what is due, once."""
        now = self._clock()
        pause, self._passed_at = self._pauses.pause(now - self._passed_at), now
        if self._failing:
            self._end_lost_builds()
        elif pause:
            log.warning("the controller was paused", seconds=round(pause, 1))
            self.reconciler.resume(pause, now)
        self._failing = True
        try:
            self._idle.clear()
            for action in self.reconciler.actions(now):
                self._execute(action)
            self.drains.discard_failed()
            await self._publisher.publish()
        except Exception:
            self._idle.set()  # a stop does not wait for drains that no pass begins
            raise
        self._failing = False
        if self.reconciler.idle:
            self._idle.set()

    def _execute(self, action: Action) -> None:
        match action:
            case Launch(name):
                log.info("a build starts", replica=name.replica_id, generation=name.generation)
                self._builds[name] = Build()
                self._spawn(name, self._run_build(name, action))
            case Stop(name, drain, held):
                if not drain:
                    self._builds.get(name, Build()).cancel_tasks()
                self._begin_end(name, drain=drain, held=held)

    def _end_lost_builds(self) -> None:
        """After a failed pass: ends builds whose Stop, and reports starts whose Launch, was not executed."""
        now = self._clock()
        for record in list(self.reconciler.builds()):
            if record.state is State.STARTING and record.name not in self._builds:
                self.reconciler.start_failed(record.name, "the controller failed before it started", now, final=False)
        kept = {record.name for record in self.reconciler.builds() if record.running}
        held = {record.name for record in self.reconciler.builds() if record.held}
        for name in self._builds.keys() - kept - self._ending:
            self._begin_end(name, drain=True, held=name in held)

    async def _run_build(self, name: ReplicaName, launch: Launch | None = None) -> None:
        """One build: place, start, watch until it ends. launch: None = an earlier controller has created its ranks."""
        build = self._builds[name]
        try:
            if launch is not None:
                async with self._place_locks[name.replica_id]:
                    seconds = SURGE_PLACE_SECONDS if launch.beside else None
                    on_wait = partial(self._waits_for_place, name, build)
                    build.ranks = await self._driver.launch(name, launch.model, launch.role, on_wait, seconds)
            poll = asyncio.create_task(self._repeated.poll_progress(name, build))
            try:
                build.started = await self._driver.start(name)
            finally:
                poll.cancel()
        except Exception as error:
            final = error.final if isinstance(error, StartFailedError) else isinstance(error, HeadraceError)
            unexpected = None if isinstance(error, HeadraceError) else error  # Ray does not answer, or a bug
            log.error(str(error), replica=name.replica_id, generation=name.generation, exc_info=unexpected)
            lacks_resources = isinstance(error, PlacementError) or (
                isinstance(error, StartFailedError) and error.lacks_resources
            )
            await self._clean_up(name)
            self.reconciler.start_failed(name, str(error), self._clock(), final=final, lacks_resources=lacks_resources)
            self._wake.set()
            return
        self.reconciler.started(name, self._clock())
        device = build.started.device
        build.ranks = [RankFacts(r.rank, r.pid, r.node, r.device or device) for r in build.ranks]
        await self._watch_build(name, build)

    async def _await_reply(self, name: ReplicaName, build: Build) -> None:
        """A build that may be up continues once its ranks reply. Those that do not are ended by the reconciler."""
        found = await self._repeated.report(name)
        if found is None:
            await self._clean_up(name)
            self.reconciler.start_failed(name, "it was not up when its ranks replied", self._clock(), final=False)
            self._wake.set()
            return
        restore_late(self.reconciler, found, self._clock())
        build.ranks, build.started, build.reports = found.ranks, found.started, found.reports
        self._wake.set()
        await self._watch_build(name, build)

    def _waits_for_place(self, name: ReplicaName, build: Build, reason: str) -> None:
        build.progress = None if reason else Progress("waiting for its processes", 0.0)
        self.reconciler.waits_for_place(name, reason, self._clock())
        self._wake.set()

    async def _watch_build(self, name: ReplicaName, build: Build) -> None:
        """Watches a build that is up until it ends by itself."""
        assert build.started is not None
        health = partial(self._watch, build.started.address, self._spec.health, self._health.receiver(name, build))
        self._spawn(name, self.retries.run(f"the health of {name.replica_id}", health))
        # It may have changed while the build started.
        self._spawn(name, self._repeated.send_secret(name))
        self._spawn(name, self._repeated.record_reports(name, build))
        death = partial(self._driver.wait_for_death, name)
        cause = await self.retries.run(f"the watch over {name.replica_id}", death)
        build.ended = True
        log.warning(cause, replica=name.replica_id, generation=name.generation)
        self.reconciler.died(name, cause, self._clock())
        self._wake.set()
        # No await before this: the lock is first come, first served, and the next build waits for it, too.
        async with self._place_locks[name.replica_id]:
            await self._clean_up(name)

    async def _clean_up(self, name: ReplicaName) -> None:
        """Ends the remaining parts of a build that failed: other ranks, placement group, watchers."""
        build = self._builds.pop(name, Build())
        build.cancel_tasks()
        await self._repeated.stop(name, CLEANUP_SECONDS)
        self._wake.set()

    def _begin_end(self, name: ReplicaName, *, drain: bool, held: bool) -> None:
        self._ending.add(name)
        task = self._background.start(self._end(name, drain=drain, held=held))
        task.add_done_callback(lambda _: self._ending.discard(name))

    async def _end(self, name: ReplicaName, *, drain: bool, held: bool) -> None:
        if drain:
            begin = partial(self._driver.drain, name, held=held)
            beginning = self._background.start(self.retries.run(f"the drain of {name.replica_id}", begin))
            await self.drains.wait_until_empty(name, self._builds.get(name, Build()))
            beginning.cancel()  # a rank that does not reply until the deadline is ended anyway
        async with self._place_locks[name.replica_id]:
            build = self._builds.pop(name, Build())
            build.cancel_tasks()
            await self._repeated.stop(name)
            self.reconciler.stopped(name, self._clock())
            self.drains.discard(name)
        self._wake.set()

    def _check_role(self, name: ReplicaName, reported: int) -> None:
        if self.roles.differs(name, reported):
            self._spawn(name, self.roles.correct(name))

    def _spawn(self, name: ReplicaName, work: Coroutine[Any, Any, None]) -> None:
        task = self._background.start(work)
        tasks = self._builds[name].tasks
        tasks.add(task)
        task.add_done_callback(tasks.discard)

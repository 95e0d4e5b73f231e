"""Compares and acts: sees what there is, asks the planner for the next steps, and makes them."""

import asyncio
import contextlib
import math
import random
import time
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from functools import partial
from heapq import nlargest
from typing import Any, TypeVar

import msgspec
import structlog

from headrace_base.errors import counted
from headrace_cluster.controller.members import Membership, member_list
from headrace_cluster.controller.replica_health import STATES, HealthWatch
from headrace_cluster.core.actions import Action, CreateRanks, DrainBuild, EndBuild, PlaceBuild, SendSecret, SetRole
from headrace_cluster.core.backoff import Backoff, Pauses
from headrace_cluster.core.driver import RankDriver
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.planner import Planner
from headrace_cluster.core.rank_config import RankReport
from headrace_cluster.core.replica_build import Build, State
from headrace_cluster.core.wanted import usable_spec, wanted_replicas
from headrace_cluster.core.words import UsedSpec, Words
from headrace_cluster.errors import AdoptionError
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_proto import replica_pb2

T = TypeVar("T")

BACKOFF = Backoff(0.2, 30.0)
SHOWN_SECONDS = 60.0  # after its last failure, for a problem to be shown; longer than any pause
STABLE_SECONDS = 60.0  # work that ran for longer than this before it failed starts again with the first pause


@dataclass(slots=True)
class _Problem:
    sentence: str
    at: float


class Retries:
    """Repeats background work that fails unexpectedly: an error of the controller or of Ray stops no replica.

    For one event loop. Times are seconds of `clock`.
    """

    def __init__(self, clock: Callable[[], float], jitter: Callable[[], float] = random.random) -> None:
        self._clock = clock
        self._jitter = jitter
        self._problems: dict[str, _Problem] = {}

    async def run(self, label: str, work: Callable[[], Awaitable[T]]) -> T:
        """The result of `work`, which is repeated until it returns. label: of the work in messages, unique."""
        failures = 0
        while True:
            began = self._clock()
            try:
                result = await work()
            except Exception as error:
                failures = 1 if self._clock() - began > STABLE_SECONDS else failures + 1
                self.note(label, error, failures)
                await asyncio.sleep(BACKOFF.seconds(failures, self._jitter))
            else:
                self._problems.pop(label, None)
                return result

    def note(self, label: str, error: BaseException, failures: int = 1) -> None:
        """Shows a failure for a while, and logs it; the traceback only the first time."""
        often = "" if failures == 1 else f" {counted(failures, 'time')}"
        sentence = f"{label} failed{often} ({type(error).__name__}: {error}) and is repeated"
        log.error(sentence, exc_info=error if failures == 1 else None)
        self._problems[label] = _Problem(sentence, self._clock())

    def forget(self, label: str) -> None:
        """Work that failed has succeeded."""
        self._problems.pop(label, None)

    @property
    def problems(self) -> list[str]:
        """What failed lately, a sentence each."""
        now = self._clock()
        self._problems = {label: entry for label, entry in self._problems.items() if now - entry.at < SHOWN_SECONDS}
        return [entry.sentence for entry in self._problems.values()]


TURN_SECONDS = 0.2
LOOK_SECONDS = 1.0  # between two looks at what Ray has
SAVE_SECONDS = 1.0  # between two looks at whether the record has changed
NOTE_SECONDS = 2.0  # without a place, until the reason is shown
CALL_SECONDS = 5.0  # for a rank to answer
STOP_SECONDS = 5.0  # for the engine of a rank to stop in order
CLEANUP_SECONDS = 1.0  # the same of a build that failed: one may be stopped and not reply
FIRST_SECONDS = 15.0  # for the ranks of an earlier controller to report, before anything is decided
LOST_SECONDS = 60.0  # from the start of a new record, in which routers receive from replicas of a lost one
SEEN_SECONDS = 1.0  # for the effect of a step to be seen, until it is made again
REPEAT = Backoff(0.2, 10.0)  # until a step that failed is made again

log = structlog.get_logger(__name__)


class ControlLoop:
    """`open`, `start`, then `stop` or nothing. For one event loop."""

    def __init__(
        self,
        spec: ClusterSpec,
        words: Words,
        driver: RankDriver,
        membership: Membership,
        watch_health: HealthWatch,
        secrets: Callable[[], tuple[bytes, ...]],
        save: Callable[[Words], Awaitable[None]],
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
        origin: str = "",
    ) -> None:
        """words: the record of the cluster. secrets: fingerprints of those that are valid now. save: of the record.

        origin: of the spec, for people.
        """
        self.spec = spec
        self.effective = spec  # with the words of operators
        self.unused_words: list[str] = []  # a sentence about each that does not fit to the spec any more
        self.words = words
        self.driver = driver
        self.retries = Retries(clock, jitter)
        self.planner = Planner(spec.health, words, secrets, clock(), membership.router_reports)
        self.clock = clock
        self._membership = membership
        self._watch_health = watch_health
        self._save = save
        self._jitter = jitter
        self._origin = origin
        self._new_until = -math.inf  # no earlier controller has left a record: one may have been lost
        self.health: dict[ReplicaName, replica_pb2.ReplicaHealth] = {}  # the last message of each build
        self._health_at: dict[ReplicaName, float] = {}
        self._routers_seen: list[tuple[ReplicaName, int]] = []  # by the two builds that have most
        self._counted_routers = 0
        self._watched: dict[tuple[ReplicaName, int], asyncio.Task[None]] = {}  # ranks
        self._streams: dict[ReplicaName, asyncio.Task[None]] = {}  # tasks that receive the health messages of a build
        self._steps: dict[tuple[ReplicaName, str], asyncio.Task[None]] = {}  # that are being made
        self._failures: dict[tuple[ReplicaName, str], tuple[int, float]] = {}  # how often, and not before when again
        self._saved = b""  # the record as it is kept
        self._save_lock = asyncio.Lock()
        self._pauses = Pauses()
        self._turned_at = clock()
        self._stopping = False
        self._wake = asyncio.Event()
        self._looks = asyncio.Event()  # ends the wait for the next look
        self._reported = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> tuple[int, int]:
        """Sees what an earlier controller has left: the number of builds that go on, and of these that are outdated.

        Raises AdoptionError if they are of another secret: nothing was changed.
        """
        self.rethink()
        await self._look()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_SECONDS):
                await self.until(lambda: not any(build.silent for build in self.planner.builds.values()))
        builds = [build for build in self.planner.builds.values() if build.reports]
        if builds and all(build.foreign for build in builds):
            raise AdoptionError(builds[0].foreign)
        ours = [build for build in builds if not build.foreign]
        wanted = self.planner.wanted
        outdated = [b for b in ours if b.replica_id not in wanted or b.digest != wanted[b.replica_id].digest]
        return len(ours), len(outdated)

    def start(self) -> None:
        """Begins to act, by what the record says now."""
        self.rethink()
        self._turned_at = self.clock()
        if not self.words.created:
            self._new_until = self.clock() + LOST_SECONDS
        self._find_lost_record()
        self.words.created = self.words.created or int(time.time())
        works = (self._turns(), self._keep_looking(), self._keep_saving())
        self._tasks = [asyncio.create_task(work) for work in works]

    async def stop(self) -> None:
        """Drains and ends every replica. What cannot be ended in time is ended by name later."""
        self._stopping = True
        self.rethink()
        self.planner.hurry(self.spec.health.drain_seconds, self.clock())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.spec.health.drain_seconds + 10):
                while not self.planner.idle:
                    self._looks.set()
                    await asyncio.sleep(TURN_SECONDS)
        for task in [*self._tasks, *self._watched.values(), *self._streams.values(), *self._steps.values()]:
            task.cancel()

    def rethink(self) -> None:
        """The spec, or the words of operators, have changed."""
        self.words.spec = UsedSpec([model.model_dump(mode="json") for model in self.spec.models], self._origin)
        self.effective, self.unused_words = usable_spec(self.spec, self.words)
        self.driver.spec = self.effective
        wanted = {} if self._stopping else wanted_replicas(self.effective, self.words, self.driver.digest)
        self.planner.wanted = wanted
        self._wake.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns when it holds; it is looked at after each report of a rank."""
        while not condition():
            self._reported.clear()
            await self._reported.wait()

    def forget_saved(self) -> None:
        """The store has lost the record: it is kept again."""
        self._saved = b""

    async def save(self) -> None:
        """Keeps the record, if it has changed. Raises what the store raises."""
        async with self._save_lock:
            encoded = msgspec.msgpack.encode(self.words)
            if encoded != self._saved:
                await self._save(self.words)
                self._saved = encoded

    def _find_lost_record(self) -> None:
        """Replicas that no controller of this record has built: what operators said before is lost with another one."""
        builds, newest, now = self.planner.builds, self.words.generations, self.clock()
        if now > self._new_until or self.words.lost:
            return
        found = any(not build.made_here and not build.foreign for build in builds.values())
        for name in self._membership.router_reports.received(now):
            starts = name in builds and builds[name].state in (State.PENDING, State.STARTING)
            found |= starts or name.generation > newest.get(name.replica_id, 0)
        if found:
            self.words.lost = int(time.time())
            log.warning("the record of an earlier controller is lost; the spec alone counts")

    async def _keep_saving(self) -> None:
        while True:
            await self.retries.run("the record in Ray's GCS", self.save)
            await asyncio.sleep(SAVE_SECONDS)

    # -- what is seen ------------------------------------------------------------------------------------------

    async def _keep_looking(self) -> None:
        while True:
            await self.retries.run("a look at Ray", self._look)
            self._looks.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await self._looks.wait()

    async def _look(self) -> None:
        began = self.clock()
        seen = await self.driver.look()
        self.planner.observe(seen, began, self.clock())
        for key in seen.ranks:
            if key not in self._watched and key[0] in self.planner.builds:
                self._watched[key] = asyncio.create_task(self._watch_rank(*key))
        for key in [key for key in self._watched if key[0] not in self.planner.builds]:
            self._watched.pop(key).cancel()
        for build in list(self.planner.builds.values()):
            wanted = self.planner.wanted.get(build.replica_id)
            if build.state is State.PENDING and wanted is not None and self.clock() - build.since > NOTE_SECONDS:
                self.planner.waits_for_place(build.name, await self.driver.waiting_reason(wanted.model))
        self._wake.set()

    async def _watch_rank(self, name: ReplicaName, rank: int) -> None:
        def receive(report: RankReport) -> None:
            build = self.planner.builds.get(name)
            before = build.reports.get(rank) if build is not None else None
            self.planner.report(name, rank, report, self.clock())
            self._reported.set()
            if before is None or before.stage is not report.stage:
                self._wake.set()

        await self.retries.run(f"the watch over {name.rank(rank)}", partial(self.driver.watch, name, rank, receive))
        self.planner.rank_ended(name, rank, self.clock())
        self._reported.set()
        self._wake.set()

    def _watch_builds(self) -> None:
        """Every build that has started sends health messages; that of one that has gone ends."""
        for build in self.planner.builds.values():
            if build.name not in self._streams and build.started is not None and not build.foreign:
                work = partial(self._watch_health, build.started.address, self.spec.health, self._receiver(build))
                label = f"the health of {build.replica_id}"
                self._streams[build.name] = asyncio.create_task(self.retries.run(label, work))
        for name in self._streams.keys() - self.planner.builds.keys():
            self._streams.pop(name).cancel()
            self.health.pop(name, None)
        self._failures = {key: entry for key, entry in self._failures.items() if key[0] in self.planner.builds}

    def _receiver(self, build: Build) -> Callable[[replica_pb2.ReplicaHealth], None]:
        def receive(health: replica_pb2.ReplicaHealth) -> None:
            before = self.health.get(build.name)
            self.health[build.name], self._health_at[build.name] = health, self.clock()
            state, load = STATES.get(health.state, State.UNHEALTHY), health.load
            self.planner.health_received(
                build.name,
                state,
                load.predicted_step_ms / 1e3,
                load.running + load.waiting,
                self.clock(),
                connected=health.routers >= self._known_routers(build.name),
            )
            if before is None or before.state != health.state:
                log.info(str(state), replica=build.replica_id, generation=build.name.generation)
                self._wake.set()

        return receive

    def _known_routers(self, own: ReplicaName) -> int:
        """The number of routers that count here, or by other builds: they know routers that are cut off from here."""
        others = (count for name, count in self._routers_seen if name != own)
        return max(self._counted_routers, next(others, 0))

    def _count_routers(self, now: float) -> None:
        """Once a turn: messages of replicas are many."""
        since = now - self.spec.health.silence_seconds
        seen = [(name, health.routers) for name, health in self.health.items() if self._health_at[name] >= since]
        self._routers_seen = nlargest(2, seen, key=lambda entry: entry[1])
        self._counted_routers = self._membership.counted_routers

    # -- turns -------------------------------------------------------------------------------------------------

    async def _turns(self) -> None:
        while True:
            self._wake.clear()  # before the turn: a change during it starts the next one without a wait
            await self.retries.run("a turn of the controller", self._turn)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TURN_SECONDS):
                    await self._wake.wait()

    async def _turn(self) -> None:
        now = self.clock()
        pause, self._turned_at = self._pauses.pause(now - self._turned_at), now
        if pause:
            log.warning("the controller was paused", seconds=round(pause, 1))
            self.planner.resume(pause, now)
        self._count_routers(now)
        self._find_lost_record()
        for action in self.planner.actions(now):
            self._begin(action, now)
        self._watch_builds()
        await self._membership.publish(*member_list(self.effective, self.words.created, self.planner))

    def _begin(self, action: Action, now: float) -> None:
        key = action.name, f"{type(action).__name__}{getattr(action, 'rank', '')}"
        build = self.planner.builds.get(action.name)
        failures, not_before = self._failures.get(key, (1, 0.0))
        unseen = not failures and build is not None and build.touched > self.planner.looked_at
        if build is None or key in self._steps or now < not_before or unseen:
            return
        step = self._steps[key] = asyncio.create_task(self._make(key, action, build))
        step.add_done_callback(lambda _: self._steps.pop(key, None))

    async def _make(self, key: tuple[ReplicaName, str], action: Action, build: Build) -> None:
        label = f"{_WORDS[type(action)]} {action.name.replica_id}"
        failures = self._failures.get(key, (0, 0.0))[0]
        try:
            build.touched = math.inf  # what is seen meanwhile does not count
            await self._step(action, build)
        except Exception as error:
            failures += 1
            self._failures[key] = failures, self.clock() + REPEAT.seconds(failures, self._jitter)
            self.retries.note(label, error, failures)
        else:
            self._failures[key] = 0, self.clock() + SEEN_SECONDS
            self.retries.forget(label)
        build.touched = self.clock()
        self._looks.set()
        self._wake.set()

    def _step(self, action: Action, build: Build) -> Coroutine[Any, Any, None]:
        match action:
            case PlaceBuild():
                return self._place(action, build)
            case CreateRanks(name, model, role, digest):
                return self._fill(build, self.driver.fill(name, model, role, digest))
            case SendSecret(name, rank):
                return _within(CALL_SECONDS, self.driver.send_secret(name, rank))
            case SetRole(name, role):
                return _within(CALL_SECONDS, self.driver.set_role(name, role))
            case DrainBuild(name, seconds):
                return _within(CALL_SECONDS, self.driver.drain(name, seconds))
            case EndBuild(name, gently):
                return self.driver.end(name, STOP_SECONDS if gently else CLEANUP_SECONDS)

    async def _place(self, action: PlaceBuild, build: Build) -> None:
        await self.save()  # its number is not used again
        log.info("a build starts", replica=build.replica_id, generation=build.name.generation)
        await self.driver.place(action.name, action.model)
        build.requested = True

    async def _fill(self, build: Build, work: Coroutine[Any, Any, None]) -> None:
        await work
        build.filled = True


_WORDS: dict[type, str] = {
    PlaceBuild: "the request for a place of",
    CreateRanks: "the creation of",
    SendSecret: "the secret for",
    SetRole: "the role of",
    DrainBuild: "the drain of",
    EndBuild: "the end of",
}


async def _within(seconds: float, work: Coroutine[Any, Any, None]) -> None:
    async with asyncio.timeout(seconds):
        await work

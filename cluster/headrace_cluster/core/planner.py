"""Compares what is wanted with what is seen, and names the next steps. Pure: no Ray, no clock, no sockets.

    spec, words of operators ── wanted ──▶ ┌─────────┐ ── actions(now) ──▶ Place, Fill, … End
    what Ray has, ranks report, health   ▶ │ Planner │
                                           └─────────┘ ── builds, slots ──▶ status, member list

An action is named in each turn until its effect is seen: one that was lost is repeated, by the next controller, too.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from itertools import islice

from headrace_cluster.core.actions import (
    Action,
    CreateRanks,
    DrainBuild,
    EndBuild,
    PlaceBuild,
    Seen,
    SendSecret,
    SetRole,
)
from headrace_cluster.core.health_judge import HealthJudge
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.rank_config import RankReport
from headrace_cluster.core.replica_build import SERVING, Build, Death, Slot, State
from headrace_cluster.core.router_reports import RouterReports
from headrace_cluster.core.wanted import Wanted
from headrace_cluster.core.words import Words
from headrace_cluster.spec.process_specs import HealthSpec
from headrace_proto.role import Role
from headrace_proto.stall import stall_limit

ROUTERS_SECONDS = 4.0  # from a controller's start, for routers to find it: they try again within 3 s
START_TRIES = 3  # tries to start a replica that was never ready, when it dies without a named error
PLACE_SECONDS = 5.0  # to place a second build of a replica: waiting longer frees no resources
CONNECT_SECONDS = 60.0  # for every router to connect to a build that is ready; a lost one counts for 40 s
STABLE_SECONDS = 0.5  # that every router must be connected to the next build before the old one drains
NODE_SECONDS = 3.0  # before Ray ends a node, for requests to move from it
LAST_SECONDS = 5.0  # before that, for requests in flight of a build without a successor; it serves until then
BEFORE_NEXT = "its next build did not start, and the old one continues"


class Planner:
    """Single-threaded; the caller passes the time, in seconds of one clock."""

    def __init__(
        self,
        health: HealthSpec,
        words: Words,
        secrets: Callable[[], Collection[bytes]],
        now: float,
        router_reports: RouterReports | None = None,
    ) -> None:
        """words: the record, in which generations are counted. secrets: fingerprints of those that are valid now.

        router_reports: which replicas routers receive from; none: only this controller judges them.
        """
        self.words = words
        self.builds: dict[ReplicaName, Build] = {}
        self._builds_of: dict[str, list[Build]] = {}  # by replica id, in the order of their generations
        self.slots: dict[str, Slot] = {}
        self.failures: Counter[str] = Counter()  # builds that ended or did not start, by model
        self.unable: dict[str, str] = {}  # replicas that were never ready and cannot start, and why
        self._unsettled: dict[str, list[tuple[str, str, bool]]] = {}  # by model: see `_find_unsettled`
        self._failed: dict[str, list[str]] = {}  # by model
        self._others_reply = False  # ranks of some build do
        self._wanted: Mapping[str, Wanted] = {}
        self.wanted = {}
        self.looked_at = -math.inf  # when the last look at Ray began
        self._health = health
        self._secrets = secrets
        self._judge = HealthJudge(health, router_reports or RouterReports())
        self._routers_known_at = now  # later if there is something to find

    # -- what is shown -----------------------------------------------------------------------------------------

    @property
    def wanted(self) -> Mapping[str, Wanted]:
        """By replica id."""
        return self._wanted

    @wanted.setter
    def wanted(self, wanted: Mapping[str, Wanted]) -> None:
        for name, slot in self.slots.items():  # what failed may start as it is described now
            if name in self._wanted and name in wanted and wanted[name].digest != self._wanted[name].digest:
                slot.failures, slot.not_before = [], 0.0
        for name in list(self.unable):
            if name not in wanted or name not in self._wanted or wanted[name].digest != self._wanted[name].digest:
                del self.unable[name]
        self._wanted = wanted
        self._of_model: dict[str, list[str]] = {}  # those that are not drained
        for name, each in wanted.items():
            if not each.drained:
                self._of_model.setdefault(each.model.name, []).append(name)
        self._forget_turn()

    def builds_of(self, replica_id: str) -> list[Build]:
        """In the order of their generations."""
        return self._builds_of.get(replica_id, [])

    def current(self, replica_id: str) -> Build | None:
        """The build that stands for a replica: the oldest that is not to end, else the newest."""
        builds = self.builds_of(replica_id)
        return next((build for build in builds if not build.leaving), builds[-1] if builds else None)

    @property
    def ready(self) -> bool:
        """Whether every wanted replica is ready; drained replicas do not count."""
        return all(self.is_ready(name) for name, wanted in self.wanted.items() if not wanted.drained)

    def is_ready(self, replica_id: str) -> bool:
        """Whether its build is ready."""
        build = self.current(replica_id)
        return build is not None and build.serves

    @property
    def fatal(self) -> str:
        """Why the cluster cannot start at all; empty while it can, and once any replica was ready."""
        return "" if self.words.served else next(iter(self.unable.values()), "")

    @property
    def idle(self) -> bool:
        """Whether there is no build but those that are left as they are."""
        return all(build.foreign for build in self.builds.values())

    def peers(self, replica_id: str) -> list[str]:
        """Other replicas of its model that are wanted and not drained."""
        return [name for name in self._of_model.get(self.wanted[replica_id].model.name, ()) if name != replica_id]

    def another_answers(self, replica_id: str) -> bool:
        """Whether requests for the model can go to another replica."""
        return any(build.answers for name in self.peers(replica_id) for build in self.builds_of(name))

    def _obstacle(self, wanted: Wanted) -> str:
        """Why this replica may not be replaced now, in a sentence; empty: all others of its model serve.

        With allow_gap those that do not serve are no obstacle, but those that change are.
        """
        model = wanted.model.name
        if model not in self._unsettled:
            found = [entry for name in self._of_model.get(model, ()) if (entry := self._find_unsettled(name))]
            # Two of each kind suffice: one may be the replica itself.
            self._unsettled[model] = [each for kind in (True, False) for each in found if each[2] is kind][:2]
        others = [entry for entry in self._unsettled[model] if entry[0] != wanted.replica_id]
        return next((why for _, why, changes in others if changes or not wanted.allow_gap), "")

    def _find_unsettled(self, name: str) -> tuple[str, str, bool] | None:
        """Describes a replica that does not serve: id, how it is, whether it changes now. None if it has no place."""
        builds = self.builds_of(name)
        if len(builds) > 1 or any(build.leaving for build in builds):
            return name, f"{name} is being rolled", True
        if builds and builds[0].state in (State.PENDING, State.STARTING):
            return None if self._has_no_place(builds[0]) else (name, f"{name} is {builds[0].state}", True)
        if not builds or builds[0].state is not State.READY:
            return name, f"{name} is {builds[0].state if builds else State.DEAD}", False
        if builds[0].connected is None:
            return name, f"not every router is connected to {name} yet", False
        return None

    def _has_no_place(self, build: Build) -> bool:
        """Whether Ray has had none for it for so long that waiting does not help. Looks that fail do not count."""
        waits = build.requested and build.state is State.PENDING
        return waits and self.looked_at - max(build.since, build.touched) > PLACE_SECONDS

    def forget(self, replica_id: str) -> None:
        """What failed so far does not count for the next build."""
        self.slots.pop(replica_id, None)
        self.unable.pop(replica_id, None)

    def forgive(self, replica_id: str) -> None:
        """An operator asks for another try."""
        slot = self._slot(replica_id)
        slot.refused = slot.gap = None
        slot.refusal, slot.asked, slot.not_before, slot.tries = "", True, 0.0, {}
        self.unable.pop(replica_id, None)

    # -- what is seen ------------------------------------------------------------------------------------------

    def observe(self, seen: Seen, began: float, now: float) -> None:
        """What Ray had between `began` and `now`: of builds that were changed since then it says nothing."""
        self.looked_at = began
        ranks: dict[ReplicaName, set[int]] = {}
        for name, rank in seen.ranks:
            ranks.setdefault(name, set()).add(rank)
        for name in sorted({*seen.groups, *ranks} - self.builds.keys()):
            self._add(self._found(name, now))
        for name, build in list(self.builds.items()):
            if build.touched > began or not (build.requested or build.leaving):
                continue
            build.placed = build.placed or seen.groups.get(name, False)
            build.ranks = ranks.get(name, set())
            left = [seen.draining[r.node] for r in build.reports.values() if r.node in seen.draining]
            build.node_ends_at = now + min(left) if left else None
            if build.leave_until is not None:  # there may be less time now
                self.leave(build, build.leave_until - now, now)
            if name not in seen.groups and not build.ranks:
                self._gone(build, now)
            elif name not in seen.groups or (not build.ranks and (build.filled or not build.made_here)):
                self._die(build, Death(f"{name.replica_id} has lost its place or its processes"), now)
            elif build.filled and build.ranks and build.reports:
                for rank in set(range(build.size)) - build.ranks:
                    build.kill(rank, now)

    def report(self, name: ReplicaName, rank: int, report: RankReport, now: float) -> None:
        """A rank says what it is."""
        build = self.builds.get(name)
        if build is None:
            return
        build.receive(rank, report, now)
        ours = set(self._secrets())
        others = any(each.secrets and not ours & set(each.secrets) for each in build.reports.values())
        sentence = (
            f"{name.replica_id} runs in this Ray with another secret: pass its file with --secret-file; build "
            f"{name.generation} is left as it is, and not used"
        )
        build.foreign = sentence if others else ""

    def rank_ended(self, name: ReplicaName, rank: int, now: float) -> None:
        """Ray reports the end of a rank's process."""
        if name in self.builds:
            self.builds[name].kill(rank, now)

    def health_received(
        self, name: ReplicaName, state: State, step_seconds: float, requests: int, now: float, *, connected: bool
    ) -> None:
        """A health message: the step loop is alive. step_seconds: the predicted duration of its next step.

        requests: that run or wait. connected: whether every router is connected to it.
        """
        build = self.builds.get(name)
        if build is None:
            return
        build.last_health, build.requests, build.refuses = now, requests, state is State.DRAINING
        routers_known = now >= self._routers_known_at  # those of the last controller may not be registered yet
        build.connected = (build.connected or now) if connected and routers_known else None
        build.silence_limit = stall_limit(step_seconds, self._health.silence_seconds)
        if build.state in SERVING and state in SERVING:
            build.enter(state, now)
            build.cause = "" if state is State.READY else build.cause

    def waits_for_place(self, name: ReplicaName, reason: str) -> None:
        """Why a build has no place yet."""
        if name in self.builds and not self.builds[name].placed:
            self.builds[name].cause = reason

    def resume(self, gap: float, now: float) -> None:
        """The caller was paused for `gap` seconds and received nothing meanwhile: they do not count for any replica."""
        for build in self.builds.values():
            build.since = min(now, build.since + gap)
            build.last_health = min(now, build.last_health + gap)
            build.up_since = min(now, build.up_since + gap)

    # -- decisions ---------------------------------------------------------------------------------------------

    def actions(self, now: float) -> list[Action]:
        """The next steps."""
        self._forget_turn()
        self._others_reply = any(not build.silent for build in self.builds.values())
        for build in list(self.builds.values()):
            self._advance(build, now)
        self._judge.look(self.builds.values(), now)
        for build in [build for build in self.builds.values() if build.state in SERVING and not build.leaving]:
            if why := self._judge.judge(build, now):
                self._die(build, Death(why), now)
        for replica_id in self.wanted:
            self._plan(replica_id, now)
        unwanted = sorted(self._builds_of.keys() - self.wanted.keys())
        for replica_id in unwanted if not self._replaces_nothing_yet(now) else ():
            self._plan(replica_id, now)
        return [action for build in self.builds.values() for action in self._steps(build, now)]

    def _advance(self, build: Build, now: float) -> None:
        """The state that follows from its reports."""
        if build.foreign or build.state is State.DEAD:
            return
        if (death := build.death(now)) is not None:
            self._die(build, death, now)
        elif build.leave_until is None and build.up:
            if build.drains:  # for an earlier controller
                self.leave(build, build.reports[0].drain_seconds, now)
            elif build.state not in SERVING:
                build.enter(State.READY, now)
                build.last_health, build.silence_limit, build.cause = now, self._health.silence_seconds, ""
            self._slot(build.replica_id).served = self.words.served = True
            self.unable.pop(build.replica_id, None)
        elif build.leave_until is None and build.state not in SERVING:
            if build.placed and build.state is State.PENDING:
                build.enter(State.STARTING, now)
                build.cause = ""
            why = self._judge.judge_start(build, now, others_reply=self._others_reply) if build.placed else ""
            if why:
                self._die(build, Death(why), now)

    def _plan(self, replica_id: str, now: float) -> None:
        """What is to become of one replica's builds."""
        wanted, builds = self.wanted.get(replica_id), self.builds_of(replica_id)
        if any(build.foreign for build in builds):
            return
        staying = [build for build in builds if not build.leaving]
        if wanted is None or wanted.drained:
            for build in builds:
                self.leave(build, wanted.drain_seconds if wanted else self._health.drain_seconds, now)
            return
        self._leave_nodes(wanted, staying, now)
        staying = [build for build in staying if not build.leaving]
        good = [build for build in staying if build.digest == wanted.digest and build.node_ends_at is None]
        older = [build for build in staying if build not in good[-1:]]
        if good:
            self._take_over(wanted, good[-1], older, now)
        elif any(build.silent for build in staying):
            return  # what it is will be known, or it ends
        elif staying:
            self._replace(wanted, staying, now)
        elif not builds and now >= self._slot(replica_id).not_before and not self.fatal:
            self._place(wanted, now)  # not before the last one has gone: both need the same memory

    def _leave_nodes(self, wanted: Wanted, staying: list[Build], now: float) -> None:
        """What still runs on a node shortly before Ray ends it moves to other replicas."""
        for build in staying:
            at = build.node_ends_at
            if at is not None and now >= at - min(wanted.drain_seconds, LAST_SECONDS) - NODE_SECONDS:
                self.leave(build, wanted.drain_seconds, now)

    @staticmethod
    def _may_take_over(newest: Build, now: float) -> bool:
        """Whether every router can send requests to the newest build of a replica."""
        stable = newest.connected is not None and now - newest.connected >= STABLE_SECONDS
        return newest.serves and stable and now - newest.last_health <= newest.silence_limit

    def _replaces_nothing_yet(self, now: float) -> bool:
        """Whether none of the wanted replicas serves although it may: what the spec does not name goes on until then.

        A spec with a wrong model ends nothing that serves. Not where there is no place for both.
        """
        names = [name for name, wanted in self.wanted.items() if not wanted.drained]
        builds = [build for name in names for build in self.builds_of(name) if not build.leaving]
        pending = any(self._has_no_place(build) for build in builds)
        return bool(names) and not pending and not any(build.state in SERVING for build in builds)

    def _take_over(self, wanted: Wanted, newest: Build, older: list[Build], now: float) -> None:
        """The older builds end once every router can send requests to the newest one."""
        newest.role = wanted.role
        if not older or self._may_take_over(newest, now):
            self._slot(wanted.replica_id).asked = False
            for build in older:
                self.leave(build, wanted.drain_seconds, now)
        elif not any(build.state in SERVING for build in older):
            for build in older:
                self.leave(build, 0.0, now)
        elif any(build.node_ends_at is not None for build in older):
            return  # there is time until its node ends, and a place may come
        elif self._has_no_place(newest):
            self._die(newest, Death(newest.cause or "there is no place", lacks_resources=True), now)
        elif newest.state is State.READY and newest.connected is None and now - newest.since > CONNECT_SECONDS:
            sentence = f"not every router was connected to it after {CONNECT_SECONDS:g} s"
            self._die(newest, Death(sentence, final=True), now)

    def _replace(self, wanted: Wanted, outdated: list[Build], now: float) -> None:
        """The spec describes another build, or an operator wants a new one: one replica at a time."""
        slot = self._slot(wanted.replica_id)
        for build in outdated:
            build.role = wanted.role
        for build in [build for build in outdated if build.state not in SERVING]:
            self.leave(build, 0.0, now)
        serving = [build for build in outdated if build.state in SERVING]
        if len(serving) > 1 and self._may_take_over(serving[-1], now):  # it was wanted until a moment ago
            for build in serving[:-1]:
                self.leave(build, wanted.drain_seconds, now)
        elif (
            not serving or slot.refused == wanted.digest or now < self._routers_known_at or self._must_wait(wanted, now)
        ):
            return
        elif slot.gap == wanted.digest:
            for build in serving:
                self.leave(build, wanted.drain_seconds, now)
        else:
            self._place(wanted, now)

    def _must_wait(self, wanted: Wanted, now: float) -> bool:
        """A change whose build failed for another replica of the model goes no further."""
        slot, own = self._slot(wanted.replica_id), wanted.replica_id
        slot.waits = ""
        if now < slot.not_before:
            return True
        if any(build.node_ends_at is not None for build in self.builds_of(own)):
            return False
        slot.waits = self._obstacle(wanted)
        if not slot.waits and not slot.asked:
            failed = next((name for name in self._failed_of(wanted.model.name) if name != own), "")
            slot.waits = f"the next build of {failed} did not start" if failed else ""
        return bool(slot.waits)

    def _failed_of(self, model: str) -> list[str]:
        """Replicas of a model whose next build has failed, and is not tried again; two suffice."""
        if model not in self._failed:
            names = self._of_model.get(model, ())
            found = (name for name in names if self._slot(name).refused == self.wanted[name].digest)
            self._failed[model] = list(islice(found, 2))
        return self._failed[model]

    def _place(self, wanted: Wanted, now: float) -> None:
        """A new build."""
        replica_id, model = wanted.replica_id, wanted.model
        newest = max([0, *(build.name.generation for build in self.builds_of(replica_id))])
        generation = max(newest, self.words.generations.get(replica_id, 0)) + 1
        self.words.generations[replica_id] = generation
        name = ReplicaName(replica_id, generation)
        build = Build(name, model.name, model.tp, model.pp, wanted.digest, wanted.role, since=now, touched=now)
        build.made_here = True
        self._add(build)

    def _die(self, build: Build, death: Death, now: float) -> None:
        """It has ended, or is to end at once."""
        self._forget_turn()
        expected = build.leaving
        was_up = build.state in SERVING
        build.cause = death.cause
        build.enter(State.DEAD, now)
        if expected or build.foreign:
            return
        self.failures[build.model] += 1
        slot, wanted = self._slot(build.replica_id), self.wanted.get(build.replica_id)
        if wanted is not None and any(b.state in SERVING and not b.leaving for b in self.builds_of(build.replica_id)):
            self._refuse(slot, wanted, death, now)
            return
        slot.fail(death.cause, now)
        if wanted is not None and not (slot.served or was_up) and (death.final or len(slot.failures) >= START_TRIES):
            self.unable.setdefault(build.replica_id, death.cause)

    def _refuse(self, slot: Slot, wanted: Wanted, death: Death, now: float) -> None:
        """A build that was to replace one that serves has failed: that one continues, or ends first."""
        slot.fail(death.cause, now)
        others = any(self.wanted[name].role.decodes for name in self.peers(wanted.replica_id))
        may_end = not wanted.role.decodes or wanted.allow_gap or others
        if death.lacks_resources and may_end:
            slot.gap, slot.not_before = wanted.digest, now
            return
        slot.tries = {wanted.digest: slot.tries.get(wanted.digest, 0) + 1}
        if not (death.final or death.lacks_resources or slot.tries[wanted.digest] >= START_TRIES):
            return  # a process may be killed: it is tried again
        slot.refused = wanted.digest
        for name in [wanted.replica_id, *self.peers(wanted.replica_id)]:
            self._slot(name).asked = False
        slot.refusal = (
            f"resources for a second build beside it are missing ({death.cause}); pass --allow-gap to end it first"
            if death.lacks_resources
            else f"{BEFORE_NEXT}: {death.cause}"
        )

    def leave(self, build: Build, seconds: float, now: float) -> None:
        """It is to end: requests in flight have some seconds, if it serves and its node lasts.

        A second call may shorten them.
        """
        if build.node_ends_at is not None:
            seconds = max(0.0, min(seconds, build.node_ends_at - now - NODE_SECONDS))
        if build.leave_until is not None:
            build.leave_until = min(build.leave_until, now + seconds)
        if build.leaving:
            return
        self._forget_turn()
        if build.state in SERVING or build.up or build.silent:
            build.leave_until, build.leave_seconds = now + seconds, seconds
            build.enter(State.DRAINING, now)
        else:
            build.enter(State.DEAD, now)

    def hurry(self, seconds: float, now: float) -> None:
        """The cluster stops: no drain takes longer than this from now on."""
        for build in self.builds.values():
            if build.leave_until is not None:
                build.leave_until = min(build.leave_until, now + seconds)

    def _steps(self, build: Build, now: float) -> Iterable[Action]:
        """What is to be done for a build, to become what it is to be."""
        if build.foreign:
            return
        wanted = self.wanted.get(build.replica_id)
        if build.state is State.DEAD:
            yield EndBuild(build.name, gently=False)
        elif build.leave_until is not None:
            if now >= build.leave_until or (build.refuses and not build.requests):
                yield EndBuild(build.name, gently=True)
            elif not build.drains:
                yield DrainBuild(build.name, build.leave_until - now)
        elif wanted is not None and build.made_here and not build.requested:
            yield PlaceBuild(build.name, wanted.model)
        elif wanted is not None and build.made_here and build.placed and not build.filled:
            yield CreateRanks(build.name, wanted.model, wanted.role, build.digest)
        else:
            ours = set(self._secrets())
            for rank, report in build.reports.items():
                if set(report.secrets) != ours:
                    yield SendSecret(build.name, rank)
            if build.up and build.reports[0].role != build.role:
                yield SetRole(build.name, build.role)

    # -- helpers -----------------------------------------------------------------------------------------------

    def _slot(self, replica_id: str) -> Slot:
        return self.slots.setdefault(replica_id, Slot())

    def _found(self, name: ReplicaName, now: float) -> Build:
        """A build of an earlier controller."""
        self._routers_known_at = max(self._routers_known_at, now + ROUTERS_SECONDS)
        generations = self.words.generations
        generations[name.replica_id] = max(generations.get(name.replica_id, 0), name.generation)
        wanted = self.wanted.get(name.replica_id)
        model = wanted.model.name if wanted is not None else ""
        role = wanted.role if wanted is not None else Role.BOTH
        return Build(name, model, role=role, since=now, requested=True, filled=True)

    def _forget_turn(self) -> None:
        """What was found of models in this turn has changed."""
        self._unsettled.clear()
        self._failed.clear()

    def _add(self, build: Build) -> None:
        self.builds[build.name] = build
        self._builds_of.setdefault(build.replica_id, []).append(build)
        self._builds_of[build.replica_id].sort(key=lambda each: each.name)
        self._forget_turn()

    def _gone(self, build: Build, now: float) -> None:
        """Nothing of it exists any more."""
        if not build.leaving:
            self._die(build, Death(f"{build.replica_id} has ended"), now)
        del self.builds[build.name]
        self._builds_of[build.replica_id].remove(build)
        if not self._builds_of[build.replica_id]:
            del self._builds_of[build.replica_id]

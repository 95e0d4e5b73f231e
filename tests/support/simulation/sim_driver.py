"""The controller's driver on a simulated Ray: what `ray/driver.py` and `ray/rank_group.py` do, in virtual time."""

import asyncio
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from headrace_cluster.core.adoption import choose_builds, plan_adoption
from headrace_cluster.core.driver import (
    LATE_POLL_SECONDS,
    NOTE_SECONDS,
    PLACE_POLL_SECONDS,
    REPORT_SECONDS,
    ROLE_SECONDS,
    STOP_SECONDS,
    AdoptedBuild,
    AdoptedState,
    Progress,
    RankFacts,
    StartFailedError,
)
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.placement import waiting_sentence
from headrace_cluster.core.rank_config import ProfileOutcome, RankReport, fingerprint, replica_config
from headrace_cluster.core.record import DesiredReplica
from headrace_cluster.core.snapshot import ControllerSnapshot
from headrace_cluster.errors import AdoptionError, PlacementError, RoleError
from headrace_cluster.spec.model_spec import ModelSpec
from headrace_proto.role import Role
from headrace_worker.core.config import ReplicaConfig, ReplicaStarted
from support.simulation.rank_process import RankProcess
from support.simulation.sim_ray import PROCESS_SECONDS, SimRayError

if TYPE_CHECKING:
    from support.simulation.sim_controller import SimController

T = TypeVar("T")
RETRY_SECONDS = 0.5  # between two questions to a rank that cannot be reached
SECRETS = (b"a fingerprint of the secret",)


def rank_config(name: ReplicaName, model: ModelSpec, role: Role) -> ReplicaConfig:
    """What each rank of a build receives."""
    return replica_config(
        model,
        replica_id=name.replica_id,
        generation=name.generation,
        source=model.source,
        role=role,
        profile_dir=None,
        cpu_threads=1,
        host="127.0.0.1",
    )


class SimDriver:
    """A `ReplicaDriver` of one controller process."""

    def __init__(self, controller: "SimController") -> None:
        self._controller = controller
        self._cluster = controller.cluster
        self._ray = controller.cluster.ray
        self._world = controller.cluster.world
        self._groups: dict[ReplicaName, list[RankProcess]] = {}
        self._expected: dict[str, bytes] = {}

    async def launch(
        self,
        name: ReplicaName,
        model: ModelSpec,
        role: Role,
        on_wait: Callable[[str], None],
        seconds: float | None = None,
    ) -> list[RankFacts]:
        ray = self._ray
        group = await self.call_gcs(lambda: ray.create_group(name, model.tp))
        began = self._controller.loop.time()
        while await self.call_gcs(lambda: group.pending):
            waited = self._controller.loop.time() - began
            if waited > NOTE_SECONDS or (seconds is not None and waited > seconds):
                reason = waiting_sentence(model, 0, {"CPU": 0})
                if seconds is not None and waited > seconds:
                    await self.call_gcs(lambda: ray.remove_group(name))
                    raise PlacementError(f"{name.replica_id}: {reason}")
                on_wait(reason)
            await asyncio.sleep(PLACE_POLL_SECONDS if waited < NOTE_SECONDS else LATE_POLL_SECONDS)
        on_wait("")
        config = rank_config(name, model, role)
        ranks = await self.call_gcs(lambda: [ray.create_rank(group, rank, config) for rank in range(model.ranks)])
        self._groups[name] = ranks
        await asyncio.sleep(self._world.random.uniform(*PROCESS_SECONDS))
        if not all(rank.alive for rank in ranks):
            raise StartFailedError(f"a rank of {name.replica_id} could not be created", final=False)
        return [RankFacts(rank.rank, rank.pid, rank.node) for rank in ranks]

    async def adopt(self, replicas: Iterable[DesiredReplica], snapshot: ControllerSnapshot | None) -> AdoptedState:
        self._expected = {
            replica.replica_id: fingerprint(
                rank_config(ReplicaName(replica.replica_id, 0), replica.model, replica.role)
            )
            for replica in replicas
        }
        ranks = await self.call_gcs(lambda: dict(self._ray.ranks))
        reports: dict[tuple[ReplicaName, int], RankReport | None] = dict.fromkeys(ranks)
        reports |= zip(ranks, await asyncio.gather(*map(self._report, ranks.values())), strict=True)
        reports = {key: report for key, report in reports.items() if report is not None or ranks[key].alive}
        groups = await self.call_gcs(lambda: set(self._ray.groups))
        plan = plan_adoption(reports, groups, self._expected, SECRETS, snapshot)
        self._cluster.checks.adopted(self._controller, plan, reports)
        for key in plan.ended_ranks:
            await self.call_gcs(lambda: self._ray.kill(ranks[key], "not adopted"))  # noqa: B023
        for name in plan.ended_groups:
            await self.call_gcs(lambda: self._ray.remove_group(name))  # noqa: B023
        for build in (*(build.name for build in plan.state.builds), *plan.state.silent, *plan.state.starting):
            self._groups[build] = [ranks[key] for key in sorted(ranks) if key[0] == build]
        return plan.state

    async def report(self, name: ReplicaName) -> AdoptedBuild | None:
        ranks = self._groups[name]
        found = await asyncio.gather(*(self._report(rank) for rank in ranks))
        if not all(rank.alive for rank in ranks):
            return None
        if None in found:
            raise AdoptionError(f"{name.replica_id} does not reply")
        reports = {(name, number): report for number, report in enumerate(found)}
        builds = choose_builds(reports, self._expected, SECRETS)
        return builds[0] if builds else None

    async def _report(self, rank: RankProcess) -> RankReport | None:
        """A rank that cannot be reached is asked again within its time."""
        until = self._controller.loop.time() + REPORT_SECONDS
        while (left := until - self._controller.loop.time()) > 0:
            report = await self._call_rank(rank, rank.report, min(left, RETRY_SECONDS))
            if report is not None or not rank.alive:
                return report
        return None

    async def start(self, name: ReplicaName) -> ReplicaStarted:
        """Each rank loads for a while, once it has the secret; rank 0 makes the engine when all have."""
        ranks, world = self._groups[name], self._world
        for rank in ranks:
            if not rank.loading:
                rank.loading, rank.secrets = True, SECRETS
                world.at(world.random.uniform(*self._ray.load_seconds), lambda rank=rank: self._load(rank), rank)  # type: ignore[misc]
        while True:
            await asyncio.sleep(PLACE_POLL_SECONDS)
            causes = [rank.cause for rank in ranks if rank.cause is not None]
            if causes:
                raise StartFailedError(causes[0], final=False, lacks_resources=world.chance(0.3))
            if any(not rank.alive for rank in ranks):
                raise StartFailedError(f"a rank of {name.replica_id} was killed while it started", final=False)
            started = [rank.started for rank in ranks if rank.started is not None]
            if len(started) == len(ranks):
                return started[0]

    async def send_secret(self, name: ReplicaName) -> None:
        def install(rank: RankProcess) -> bool:
            rank.secrets = SECRETS
            return True

        if not await self._call_rank(self._groups[name][0], lambda: install(self._groups[name][0]), REPORT_SECONDS):
            raise SimRayError("the rank does not reply")

    def _load(self, rank: RankProcess) -> None:
        if self._ray.failing_starts:
            self._ray.failing_starts -= 1
            rank.end_loop("too little memory")
            return
        self._cluster.rank_loaded(rank)

    async def progress(self, name: ReplicaName) -> Progress | None:
        return Progress("loading", 0.5)

    async def wait_for_death(self, name: ReplicaName) -> str:
        if self._ray.failing and self._world.chance(0.3):
            raise SimRayError("the GCS fails")
        end: asyncio.Future[str] = self._controller.loop.create_future()

        def ended(rank: RankProcess, *, killed: bool) -> None:
            if not end.done():
                end.set_result(f"{rank.name} {'was killed' if killed else f'ended: {rank.cause}'}")

        for rank in self._groups[name]:
            rank.watch(lambda killed, rank=rank: self._post(lambda: ended(rank, killed=killed)))  # type: ignore[misc]
        return await end

    async def profile(self, name: ReplicaName, steps: int, seconds: float) -> list[ProfileOutcome]:
        return []

    async def set_role(self, name: ReplicaName, role: Role, number: int) -> None:
        """A call may reach the rank after its time, and after later ones."""
        ranks = self._groups.get(name)
        if not ranks:
            raise RoleError(f"{name.replica_id} has just ended")
        rank = ranks[0]

        def execute() -> bool:
            rank.set_role(role, number)
            self._cluster.set_role(rank)
            return True

        late = self._world.random.choice((0.0, 0.0, 0.0, 1.0, ROLE_SECONDS + 1.0, 2 * ROLE_SECONDS))
        if not await self._call_rank(rank, execute, ROLE_SECONDS, late):
            raise RoleError(f"rank 0 of {name.replica_id} does not answer: its role stays as it was")

    async def drain(self, name: ReplicaName, *, held: bool) -> None:
        def drain(rank: RankProcess) -> None:
            rank.draining, rank.held = True, held
            self._cluster.drain(rank)

        if not held:
            self._cluster.checks.draining(self._controller, name)
        ranks = self._groups.get(name, [])
        await asyncio.gather(*(self._call_rank(rank, lambda rank=rank: drain(rank), STOP_SECONDS) for rank in ranks))  # type: ignore[misc]

    async def stop(self, name: ReplicaName, seconds: float = STOP_SECONDS) -> None:
        self._cluster.checks.stopping(self._controller, name)
        ranks = self._groups.get(name, [])
        await asyncio.gather(
            *(self._call_rank(rank, lambda rank=rank: self._cluster.stop(rank), seconds) for rank in ranks)  # type: ignore[misc]
        )
        for rank in ranks:
            await self.call_gcs(lambda: self._ray.kill(rank, "stopped"))  # noqa: B023
        await self.call_gcs(lambda: self._ray.remove_group(name))
        self._groups.pop(name, None)

    # -- calls -------------------------------------------------------------------------------------------------

    async def call_gcs(self, work: Callable[[], T]) -> T:
        """Waits while the GCS is silent. Raises SimRayError while it fails."""
        await asyncio.sleep(self._world.delay())
        if self._world.now < self._ray.silent_until:
            await asyncio.sleep(1.1 * (self._ray.silent_until - self._world.now))  # of a clock that may be fast
        if self._ray.failing:
            raise SimRayError("the GCS fails")
        return work()

    async def _call_rank(self, rank: RankProcess, work: Callable[[], T], seconds: float, late: float = 0.0) -> T | None:
        """Calls a rank's process directly; None if it does not answer within `seconds`, or has ended.

        late: seconds until the call reaches the rank, beyond the usual delay.
        """
        reply: asyncio.Future[Any] = self._controller.loop.create_future()

        def answer(result: object) -> None:
            if not reply.done():
                reply.set_result(result)

        def execute() -> None:
            result = work()
            if self._cluster.network.connected(self._controller.name, rank.address):
                self._post(lambda: answer(result))

        if rank.alive and self._cluster.network.connected(self._controller.name, rank.address):
            self._world.at(late + self._world.delay(), execute, rank)
        elif not rank.alive:
            self._post(lambda: answer(None))
        try:
            async with asyncio.timeout(seconds):
                result: T | None = await reply
        except TimeoutError:
            return None
        return result

    def _post(self, call: Callable[[], None]) -> None:
        """An event of the controller's process, after a delay."""

        def entered() -> None:
            with self._controller.loop.entered():
                call()

        self._world.at(self._world.delay(), entered, self._controller)

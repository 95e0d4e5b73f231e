"""The controller's driver on a simulated Ray: what `ray/driver.py` does, in virtual time."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from headrace_cluster.core.actions import Seen
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.placement import waiting_sentence
from headrace_cluster.core.rank_config import ProfileOutcome, RankReport, config_digest, replica_config
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_cluster.spec.model_spec import ModelSpec
from headrace_proto.role import Role
from headrace_worker.core.config import ReplicaConfig
from support.simulation.sim_ray import SECRETS, RankProcess, SimRayError

if TYPE_CHECKING:
    from support.simulation.sim_controller import SimController

T = TypeVar("T")
REPORT_SECONDS = 0.5  # between two looks at the report of a rank
CALL_SECONDS = 5.0
LATE_SECONDS = (0.0, 0.0, 0.0, 1.0, CALL_SECONDS + 1.0)  # until a call for a role reaches its rank


class SimDriver:
    """A `RankDriver` of one controller process."""

    spec: ClusterSpec

    def __init__(self, controller: "SimController") -> None:
        self._controller = controller
        self._cluster = controller.cluster
        self._ray = controller.cluster.ray
        self._world = controller.cluster.world
        self._known: dict[tuple[ReplicaName, int], RankProcess] = {}

    def digest(self, replica_id: str, model: ModelSpec, roll: int) -> bytes:
        return config_digest(_config(ReplicaName(replica_id, 0), model, Role.BOTH), roll)

    async def look(self) -> Seen:
        """The GCS lists a process until it knows its end."""
        seen, ranks = await self.call_gcs(
            lambda: (
                {name: not group.pending for name, group in self._ray.groups.items()},
                self._ray.ranks | self._ray.dying,
            )
        )
        self._known |= ranks
        return Seen(seen, ranks.keys())

    async def place(self, name: ReplicaName, model: ModelSpec) -> None:
        if not await self.call_gcs(lambda: name in self._ray.groups):
            await self.call_gcs(lambda: self._ray.create_group(name, model.tp))

    async def waiting_reason(self, model: ModelSpec) -> str:
        return waiting_sentence(model, 0, {"CPU": 0})

    async def fill(self, name: ReplicaName, model: ModelSpec, role: Role, digest: bytes) -> None:
        config = _config(name, model, role)
        for rank in range(model.ranks):
            if (name, rank) not in self._ray.ranks:
                await self.call_gcs(lambda: self._ray.create_rank(name, rank, config, digest))  # noqa: B023

    async def watch(self, name: ReplicaName, rank: int, receive: Callable[[RankReport], None]) -> None:
        process, seen = self._known[name, rank], b""
        end: asyncio.Future[None] = self._controller.loop.create_future()
        process.watch(lambda: self._post(lambda: None if end.done() else end.set_result(None)))
        while not end.done():
            report = await self._call_rank(process, process.report, REPORT_SECONDS)
            if report is not None and repr(report).encode() != seen:
                seen = repr(report).encode()
                receive(report)
            await asyncio.wait([end], timeout=REPORT_SECONDS)

    async def send_secret(self, name: ReplicaName, rank: int) -> None:
        process = self._known[name, rank]

        def start() -> bool:
            process.secrets = SECRETS
            if not process.loading:
                process.loading = True
                self._world.at(self._world.random.uniform(*self._ray.load_seconds), self._load(process), process)
            return True

        await self._demand(process, start)

    def _load(self, process: RankProcess) -> Callable[[], None]:
        """Its end: rank 0 makes the engine when all have loaded."""

        def loaded() -> None:
            if self._ray.failing_starts:
                self._ray.failing_starts -= 1
                process.fail("too little memory", lacks_resources=self._world.chance(0.3))
            else:
                self._cluster.rank_loaded(process)

        return loaded

    async def set_role(self, name: ReplicaName, role: Role) -> None:
        """The call may reach the rank after its time, and after later ones."""
        process = self._known[name, 0]
        await self.call_gcs(lambda: None)  # the lease

        def execute() -> bool:
            process.role = role
            self._cluster.set_role(process)
            return True

        await self._demand(process, execute, self._world.random.choice(LATE_SECONDS))

    async def drain(self, name: ReplicaName, seconds: float) -> None:
        def drain(process: RankProcess) -> bool:
            if not process.drains_until:
                process.drains_until = self._world.now + seconds
                self._cluster.drain(process)
            return True

        await self.call_gcs(lambda: None)
        self._cluster.checks.draining(self._controller, name)
        ranks = self._of(name)
        await asyncio.gather(*(self._demand(rank, lambda rank=rank: drain(rank)) for rank in ranks))  # type: ignore[misc]

    async def profile(self, name: ReplicaName, steps: int, seconds: float) -> list[ProfileOutcome]:
        return []

    async def end(self, name: ReplicaName, seconds: float) -> None:
        await self.call_gcs(lambda: None)
        self._cluster.checks.stopping(self._controller, name)
        ranks = self._of(name)
        await asyncio.gather(
            *(self._call_rank(rank, lambda rank=rank: self._cluster.stop(rank), seconds) for rank in ranks)  # type: ignore[misc]
        )
        for rank in ranks:
            await self.call_gcs(lambda: self._ray.kill(rank, "stopped"))  # noqa: B023
        await self.call_gcs(lambda: self._ray.remove_group(name))

    # -- calls -------------------------------------------------------------------------------------------------

    def _of(self, name: ReplicaName) -> list[RankProcess]:
        """All that exist, as Ray knows them by name."""
        return [rank for key, rank in sorted(self._ray.ranks.items()) if key[0] == name]

    async def call_gcs(self, work: Callable[[], T]) -> T:
        """Waits while the GCS is silent. Raises SimRayError while it fails, and once another controller acts."""
        await asyncio.sleep(self._world.delay())
        if self._world.now < self._ray.silent_until:
            await asyncio.sleep(1.1 * (self._ray.silent_until - self._world.now))  # of a clock that may be fast
        if self._ray.failing:
            raise SimRayError("the GCS fails")
        if self._controller.acts and self._ray.lease is not self._controller:
            self._controller.kill()
            await asyncio.Event().wait()
        return work()

    async def _demand(self, rank: RankProcess, work: Callable[[], bool], late: float = 0.0) -> None:
        """Raises SimRayError when it does not answer."""
        if rank.alive and not await self._call_rank(rank, work, CALL_SECONDS, late):
            raise SimRayError("the rank does not reply")

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
            created = max(0.0, rank.answers_from - self._world.now)
            self._world.at(created + late + self._world.delay(), execute, rank)
        elif not rank.alive:
            self._post(lambda: answer(None))
        try:
            async with asyncio.timeout(seconds):
                result: T | None = await reply
        except TimeoutError:
            return None
        return result

    def _post(self, call: Callable[[], object]) -> None:
        """An event of the controller's process, after a delay."""

        def entered() -> None:
            with self._controller.loop.entered():
                call()

        self._world.at(self._world.delay(), entered, self._controller)


def _config(name: ReplicaName, model: ModelSpec, role: Role) -> ReplicaConfig:
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

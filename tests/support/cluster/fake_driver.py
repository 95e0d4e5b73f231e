"""A driver with fake replicas in this process."""

import asyncio
import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable

from headrace_cluster.core.driver import AdoptedBuild, AdoptedState, Progress, RankFacts, StartFailedError
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.rank_config import ProfileOutcome
from headrace_cluster.core.record import DesiredReplica
from headrace_cluster.core.snapshot import ControllerSnapshot
from headrace_cluster.errors import PlacementError, RoleError
from headrace_cluster.spec.model_spec import ModelSpec
from headrace_proto.role import Role
from headrace_worker.core.config import ReplicaConfig, ReplicaStarted
from support.cluster.fake_replica import FakeReplica
from support.members import MEMBER


class FakeDriver:
    """Runs fake replicas in this process. Tests end them, make them fail, or check the calls."""

    def __init__(self) -> None:
        self.replicas: dict[ReplicaName, FakeReplica] = {}
        self.calls: list[tuple[str, ReplicaName]] = []
        self.held: dict[ReplicaName, bool] = {}  # of drains: whether an operator drained it
        self.secrets: list[ReplicaName] = []  # builds that got the secret again
        self.failures: list[StartFailedError] = []  # of the next starts
        self.refusals: list[PlacementError] = []  # of the next launches
        self.profiles: list[ProfileOutcome] = []  # outcomes of a profile
        self.role_gate = asyncio.Event()  # cleared: calls of set_role block
        self.role_gate.set()
        self.numbers: defaultdict[ReplicaName, list[int]] = defaultdict(list)  # of the decisions about a role
        self.latest: defaultdict[ReplicaName, int] = defaultdict(int)  # number of the decision that a replica has
        self.unresponsive: set[ReplicaName] = set()  # calls of set_role fail
        self.without_place: set[str] = set()  # replicas for which there are no free resources
        self.process_gate = asyncio.Event()  # cleared: the processes of builds that have a place do not answer
        self.process_gate.set()
        self.errors: defaultdict[str, list[Exception]] = defaultdict(list)  # of the next calls, by method
        self.adopted_state = AdoptedState()  # of an earlier controller
        self.reports: dict[ReplicaName, AdoptedBuild] = {}  # of builds; without one it is not up
        self._deaths: dict[ReplicaName, asyncio.Future[str]] = {}

    def add_earlier_build(self, name: ReplicaName, role: Role = Role.BOTH, *, draining: bool = False) -> FakeReplica:
        """Adds a replica that an earlier controller started."""
        config = ReplicaConfig(replica_id=name.replica_id, generation=name.generation, model="smollm2", source="")
        replica = self.replicas[name] = FakeReplica(dataclasses.replace(config, role=role), MEMBER.secret)
        started = replica.start()
        replica.draining = draining
        ranks = [RankFacts(0, 1000 + name.generation, "here", started.device)]
        self.adopted_state.builds.append(AdoptedBuild(name, ranks, started, role, draining))
        self.adopted_state.generations[name.replica_id] = name.generation
        return replica

    async def adopt(self, replicas: Iterable[DesiredReplica], snapshot: ControllerSnapshot | None) -> AdoptedState:
        self.adopt_request = [replica.replica_id for replica in replicas]
        for build in self.adopted_state.builds:
            self._deaths[build.name] = asyncio.get_running_loop().create_future()
        for name in self.adopted_state.silent:
            self._deaths[name] = asyncio.get_running_loop().create_future()
        return self.adopted_state

    async def report(self, name: ReplicaName) -> AdoptedBuild | None:
        self._fail("report")
        return self.reports.get(name)

    async def launch(
        self,
        name: ReplicaName,
        model: ModelSpec,
        role: Role,
        on_wait: Callable[[str], None],
        seconds: float | None = None,
    ) -> list[RankFacts]:
        self._fail("launch")
        self.calls.append(("launch", name))
        if self.refusals:
            raise self.refusals.pop(0)
        while name.replica_id in self.without_place:
            on_wait(f"waiting for a place: {name.replica_id} needs 1 GPU")
            await asyncio.sleep(0.02)
        on_wait("")
        await self.process_gate.wait()
        config = ReplicaConfig(
            replica_id=name.replica_id,
            generation=name.generation,
            model=model.name,
            source="",
            role=role,
        )
        self.replicas[name] = FakeReplica(config, MEMBER.secret)
        self._deaths[name] = asyncio.get_running_loop().create_future()
        return [RankFacts(0, 1000 + name.generation, "here")]

    async def start(self, name: ReplicaName) -> ReplicaStarted:
        self._fail("start")
        if self.failures:
            raise self.failures.pop(0)
        return self.replicas[name].start()

    async def send_secret(self, name: ReplicaName) -> None:
        self._fail("send_secret")
        self.secrets.append(name)

    async def progress(self, name: ReplicaName) -> Progress | None:
        self._fail("progress")
        return Progress("loading", 0.5)

    async def wait_for_death(self, name: ReplicaName) -> str:
        self._fail("wait_for_death")
        return await self._deaths[name]

    async def profile(self, name: ReplicaName, steps: int, seconds: float) -> list[ProfileOutcome]:
        self.calls.append(("profile", name))
        return self.profiles

    async def set_role(self, name: ReplicaName, role: Role, number: int) -> None:
        self.calls.append(("role", name))
        self.numbers[name].append(number)
        await self.role_gate.wait()
        if name in self.unresponsive:
            raise RoleError(f"{name.replica_id} does not answer")
        if number >= self.latest[name]:
            self.latest[name] = number
            self.replicas[name].set_role(str(role))

    async def drain(self, name: ReplicaName, *, held: bool) -> None:
        self._fail("drain")
        self.calls.append(("drain", name))
        self.held[name] = held
        self.replicas[name].drain()

    async def stop(self, name: ReplicaName, seconds: float = 5.0) -> None:
        self._fail("stop")
        self.calls.append(("stop", name))
        if name in self.replicas:
            self.replicas.pop(name).stop()

    def _fail(self, method: str) -> None:
        if self.errors[method]:
            raise self.errors[method].pop(0)

    def kill(self, name: ReplicaName, cause: str = "rank 0 was killed") -> None:
        """Simulates the death of a rank's process."""
        self.replicas[name].stop()
        self._deaths[name].set_result(cause)

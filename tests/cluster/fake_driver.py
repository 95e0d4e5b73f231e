"""A driver whose replicas are fakes in this process."""

import asyncio
from collections.abc import Iterable

import msgspec
from fake_replica import FakeReplica

from headrace_cluster.controller.driver import AdoptedBuild, Inheritance, Progress, RankFacts, StartFailedError
from headrace_cluster.controller.reconciler import DesiredReplica
from headrace_cluster.errors import RoleError
from headrace_cluster.naming import ReplicaName
from headrace_cluster.pools import Role
from headrace_cluster.rank_config import ProfileOutcome
from headrace_cluster.spec import ModelSpec
from headrace_worker.config import ReplicaConfig, ReplicaStarted

SECRET = b"a secret of this test"


class FakeDriver:
    """Runs fake replicas in this process. Tests end them, fail them, or look at what was asked."""

    def __init__(self) -> None:
        self.replicas: dict[ReplicaName, FakeReplica] = {}
        self.calls: list[tuple[str, ReplicaName]] = []
        self.failures: list[StartFailedError] = []  # of the next starts
        self.profiles: list[ProfileOutcome] = []  # what a profile brings
        self.role_gate = asyncio.Event()  # closed: replicas take long to hear of a new role
        self.role_gate.set()
        self.deaf: set[ReplicaName] = set()  # those that never hear of one
        self.inheritance = Inheritance()  # what an earlier controller left
        self._deaths: dict[ReplicaName, asyncio.Future[str]] = {}

    def leave(self, name: ReplicaName, role: Role = Role.BOTH, *, draining: bool = False) -> FakeReplica:
        """A replica that an earlier controller started."""
        config = ReplicaConfig(
            replica_id=name.replica_id, generation=name.generation, model="smollm2", source="", secret=SECRET
        )
        replica = self.replicas[name] = FakeReplica(msgspec.structs.replace(config, role=str(role)))
        started = replica.start()
        replica.draining = draining
        ranks = [RankFacts(0, 1000 + name.generation, "here", started.device)]
        self.inheritance.builds.append(AdoptedBuild(name, ranks, started, role, draining))
        self.inheritance.generations[name.replica_id] = name.generation
        return replica

    async def adopt(self, replicas: Iterable[DesiredReplica]) -> Inheritance:
        self.asked_to_adopt = [replica.replica_id for replica in replicas]
        for build in self.inheritance.builds:
            self._deaths[build.name] = asyncio.get_running_loop().create_future()
        return self.inheritance

    async def launch(self, name: ReplicaName, model: ModelSpec, role: Role) -> list[RankFacts]:
        self.calls.append(("launch", name))
        config = ReplicaConfig(
            replica_id=name.replica_id,
            generation=name.generation,
            model=model.name,
            source="",
            secret=SECRET,
            role=str(role),
        )
        self.replicas[name] = FakeReplica(config)
        self._deaths[name] = asyncio.get_running_loop().create_future()
        return [RankFacts(0, 1000 + name.generation, "here")]

    async def start(self, name: ReplicaName) -> ReplicaStarted:
        if self.failures:
            raise self.failures.pop(0)
        return self.replicas[name].start()

    async def progress(self, name: ReplicaName) -> Progress | None:
        return Progress("loading", 0.5)

    async def died(self, name: ReplicaName) -> str:
        return await self._deaths[name]

    async def profile(self, name: ReplicaName, steps: int, seconds: float) -> list[ProfileOutcome]:
        self.calls.append(("profile", name))
        return self.profiles

    async def set_role(self, name: ReplicaName, role: Role) -> None:
        self.calls.append(("role", name))
        await self.role_gate.wait()
        if name in self.deaf:
            raise RoleError(f"{name.replica_id} does not answer")
        self.replicas[name].set_role(str(role))

    async def drain(self, name: ReplicaName) -> None:
        self.calls.append(("drain", name))
        self.replicas[name].drain()

    async def stop(self, name: ReplicaName, seconds: float = 5.0) -> None:
        self.calls.append(("stop", name))
        if name in self.replicas:
            self.replicas.pop(name).stop()

    def kill(self, name: ReplicaName, cause: str = "rank 0 was killed") -> None:
        """As if a rank's process had died."""
        self.replicas[name].stop()
        self._deaths[name].set_result(cause)

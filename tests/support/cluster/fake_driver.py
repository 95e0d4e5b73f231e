"""A driver with fake replicas of one rank in this process."""

import asyncio
from collections import defaultdict
from collections.abc import Callable

import msgspec

from headrace_base.errors import HeadraceError
from headrace_cluster.core.actions import Seen
from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.rank_config import ProfileOutcome, RankReport, Stage
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_cluster.spec.model_spec import ModelSpec
from headrace_proto.role import Role
from headrace_worker.core.config import ReplicaConfig
from support.cluster.fake_replica import FakeReplica
from support.members import MEMBER


class FakeRank:
    """One rank: its replica, and the report that the controller watches."""

    def __init__(self, name: ReplicaName, model: str, role: Role, digest: bytes) -> None:
        config = ReplicaConfig(
            replica_id=name.replica_id, generation=name.generation, model=model, source="", role=role
        )
        self.replica = FakeReplica(config, MEMBER.secret)
        self.alive = True
        self.report = RankReport(
            pid=1000 + name.generation, node="here", gpus=[], digest=digest, secrets=(), model=model, tp=1, pp=1,
            role=str(role),
        )  # fmt: skip
        self.changed = asyncio.Event()

    def note(self, **changes: object) -> None:
        """As production's rank."""
        self.report = msgspec.structs.replace(self.report, version=self.report.version + 1, **changes)
        self.changed.set()

    def start(self, failure: HeadraceError | None = None) -> None:
        """It has the secret."""
        if failure is not None:
            lacks = type(failure).__name__ == "MemoryTooSmallError"
            self.note(stage=Stage.FAILED, error=str(failure), final=True, lacks_resources=lacks)
        else:
            self.note(stage=Stage.READY, started=self.replica.start())


class FakeDriver:
    """A `RankDriver`. Tests end ranks, make them fail, or check the calls. It outlives its controllers, as Ray does."""

    spec: ClusterSpec

    def __init__(self) -> None:
        self.groups: dict[ReplicaName, bool] = {}
        self.ranks: dict[ReplicaName, FakeRank] = {}
        self.calls: list[tuple[str, ReplicaName]] = []
        self.failures: list[HeadraceError] = []  # of the next starts
        self.without_place: set[str] = set()  # replicas for which there are no free resources
        self.unresponsive: set[ReplicaName] = set()  # their ranks do not answer calls
        self.start_gate = asyncio.Event()  # cleared: ranks load
        self.start_gate.set()
        self.errors: defaultdict[str, list[Exception]] = defaultdict(list)  # of the next calls, by method

    @property
    def replicas(self) -> dict[ReplicaName, FakeReplica]:
        """Those that are alive."""
        return {name: rank.replica for name, rank in self.ranks.items() if rank.alive}

    def digest(self, replica_id: str, model: ModelSpec, roll: int) -> bytes:
        return f"{replica_id}/{model.name}/{model.max_num_seqs}/{roll}".encode()

    async def look(self) -> Seen:
        self._fail("look")
        for name in self.groups:
            self.groups[name] = self.groups[name] or name.replica_id not in self.without_place
        return Seen(dict(self.groups), {(name, 0) for name, rank in self.ranks.items() if rank.alive})

    async def place(self, name: ReplicaName, model: ModelSpec) -> None:
        self._called("place", name)
        self.groups[name] = name.replica_id not in self.without_place

    async def waiting_reason(self, model: ModelSpec) -> str:
        return f"waiting for a place: {model.name} needs 1 GPU"

    async def fill(self, name: ReplicaName, model: ModelSpec, role: Role, digest: bytes) -> None:
        self._called("fill", name)
        self.ranks[name] = FakeRank(name, model.name, role, digest)

    async def watch(self, name: ReplicaName, rank: int, receive: Callable[[RankReport], None]) -> None:
        self._fail("watch")
        watched = self.ranks[name]
        while watched.alive:
            if name not in self.unresponsive:
                receive(watched.report)
            watched.changed.clear()
            await watched.changed.wait()

    async def send_secret(self, name: ReplicaName, rank: int) -> None:
        await self._answer("secret", name)
        first = not self.ranks[name].report.secrets
        self.ranks[name].note(secrets=MEMBER.secret.fingerprints)
        if first:
            await self.start_gate.wait()
            self.ranks[name].start(self.failures.pop(0) if self.failures else None)

    async def set_role(self, name: ReplicaName, role: Role) -> None:
        await self._answer("role", name)
        self.ranks[name].replica.set_role(str(role))
        self.ranks[name].note(role=str(role))

    async def drain(self, name: ReplicaName, seconds: float) -> None:
        await self._answer("drain", name)
        self.ranks[name].replica.drain()
        self.ranks[name].note(stage=Stage.DRAINING, drain_seconds=seconds)

    async def profile(self, name: ReplicaName, steps: int, seconds: float) -> list[ProfileOutcome]:
        raise NotImplementedError

    async def end(self, name: ReplicaName, seconds: float) -> None:
        self._called("end", name)
        if name in self.ranks:
            self.kill(name)
            del self.ranks[name]
        self.groups.pop(name, None)

    def kill(self, name: ReplicaName) -> None:
        """The rank's process ends."""
        self.ranks[name].replica.stop()
        self.ranks[name].alive = False
        self.ranks[name].changed.set()

    def named(self, method: str) -> list[ReplicaName]:
        """The builds for which it was called."""
        return [name for called, name in self.calls if called == method]

    async def _answer(self, method: str, name: ReplicaName) -> None:
        self._called(method, name)
        if name in self.unresponsive:
            await asyncio.Event().wait()

    def _called(self, method: str, name: ReplicaName) -> None:
        self._fail(method)
        self.calls.append((method, name))

    def _fail(self, method: str) -> None:
        if self.errors[method]:
            raise self.errors[method].pop(0)

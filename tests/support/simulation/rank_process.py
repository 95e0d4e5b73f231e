"""The process of one rank in a simulated Ray."""

from collections.abc import Callable

from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.rank_config import RankReport, Stage
from headrace_proto.role import Role
from headrace_worker.core.config import ReplicaConfig, ReplicaStarted
from support.simulation.world import World

SECRETS = (b"a fingerprint of the secret",)


def address_of(build: ReplicaName) -> str:
    """The address at which a build is reached."""
    return f"{build.replica_id}.g{build.generation}"


class RankProcess:
    """Owns its events. Rank 0 also owns the replica's engine, from its readiness on."""

    def __init__(
        self, world: World, build: ReplicaName, rank: int, config: ReplicaConfig, digest: bytes, pid: int, node: str
    ) -> None:
        self.alive = True
        self.frozen_until = 0.0
        self.build = build
        self.rank = rank
        self.config = config
        self.digest = digest
        self.pid = pid
        self.node = node
        self.answers_from = 0.0  # its process is created
        self.started: ReplicaStarted | None = None
        self.secrets: tuple[bytes, ...] = ()  # fingerprints
        self.loading = False  # or loaded
        self.loaded = False
        self.role = Role(config.role)
        self.drains_until = 0.0
        self.cause: str | None = None  # its loop has ended; the process still exists
        self.lacks_resources = False
        self.vanished = False  # its node was lost: no connection was closed
        self._world = world
        self._reported = False
        self._watchers: list[Callable[[], None]] = []

    @property
    def name(self) -> str:
        return self.build.rank(self.rank)

    @property
    def address(self) -> str:
        """Of its replica, in the network."""
        return address_of(self.build)

    def report(self) -> RankReport:
        """To any controller."""
        return RankReport(
            stage=self._stage,
            pid=self.pid,
            node=self.node,
            gpus=[],
            digest=self.digest,
            secrets=self.secrets,
            model=self.config.model,
            tp=self.config.tp,
            pp=self.config.pp,
            role=str(self.role),
            started=self.started,
            drain_seconds=max(0.0, self.drains_until - self._world.now),
            error=self.cause or "",
            lacks_resources=self.lacks_resources,
        )

    @property
    def _stage(self) -> Stage:
        if self.cause is not None:
            return Stage.ENDED if self.started is not None else Stage.FAILED
        if self.started is not None:
            return Stage.DRAINING if self.drains_until else Stage.READY
        return Stage.STARTING if self.loading else Stage.WAITING

    def watch(self, on_end: Callable[[], None]) -> None:
        """Calls once when Ray reports that the process has ended."""
        if self._reported:
            on_end()
        else:
            self._watchers.append(on_end)

    def end_loop(self, cause: str) -> None:
        """Its loop ends by itself, or because it was stopped."""
        self.cause = self.cause or cause

    def fail(self, cause: str, *, lacks_resources: bool) -> None:
        """Its start fails."""
        self.cause, self.lacks_resources = cause, lacks_resources

    def report_death(self) -> None:
        """Ray reports that the process has ended."""
        self._reported = True
        watchers, self._watchers = self._watchers, []
        for on_end in watchers:
            on_end()

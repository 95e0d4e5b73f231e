"""The process of one rank in a simulated Ray."""

from collections.abc import Callable

from headrace_cluster.core.naming import ReplicaName
from headrace_cluster.core.rank_config import RankReport, Stage, fingerprint
from headrace_proto.role import Role
from headrace_worker.core.config import ReplicaConfig, ReplicaStarted
from support.simulation.world import World


def address_of(build: ReplicaName) -> str:
    """The address at which a build is reached."""
    return f"{build.replica_id}.g{build.generation}"


class RankProcess:
    """Owns its events. Rank 0 also owns the replica's engine, from its readiness on."""

    def __init__(self, world: World, build: ReplicaName, rank: int, config: ReplicaConfig, pid: int, node: str) -> None:
        self.alive = True
        self.frozen_until = 0.0
        self.build = build
        self.rank = rank
        self.config = config
        self.pid = pid
        self.node = node
        self.started: ReplicaStarted | None = None
        self.secrets: tuple[bytes, ...] = ()  # fingerprints
        self.loading = False  # or loaded
        self.loaded = False
        self.role = Role(config.role)
        self.role_number = 0
        self.draining = False
        self.held: bool | None = None
        self.cause: str | None = None  # its loop has ended; the process still exists
        self.vanished = False  # its node was lost: no connection was closed
        self._world = world
        self._reported = False
        self._watchers: list[Callable[[bool], None]] = []

    @property
    def name(self) -> str:
        return self.build.rank(self.rank)

    @property
    def address(self) -> str:
        """Of its replica, in the network."""
        return address_of(self.build)

    def report(self) -> RankReport:
        """For a controller that did not start it."""
        return RankReport(
            pid=self.pid,
            node=self.node,
            gpus=[],
            fingerprint=fingerprint(self.config),
            secrets=self.secrets,
            model=self.config.model,
            tp=self.config.tp,
            pp=self.config.pp,
            role=str(self.role),
            role_number=self.role_number,
            stage=self.stage,
            started=self.started,
            held=self.held,
        )

    @property
    def stage(self) -> Stage:
        """As production's rank reports it."""
        if self.cause is not None:
            return Stage.ENDED
        if self.started is not None:
            return Stage.DRAINING if self.draining else Stage.READY
        return Stage.STARTING if self.loading else Stage.WAITING

    def set_role(self, role: Role, number: int) -> None:
        """As production's rank: not after a newer decision."""
        if number >= self.role_number:
            self.role, self.role_number = role, number

    def watch(self, on_end: Callable[[bool], None]) -> None:
        """Calls once when the rank has ended; true: its process was killed. The loop's end is reported directly."""
        if self._reported or self.cause is not None:
            on_end(self._reported)
        else:
            self._watchers.append(on_end)

    def end_loop(self, cause: str) -> None:
        """Its loop ends by itself, or because it was stopped."""
        if self.cause is None:
            self.cause = cause
            self._notify(killed=False)

    def report_death(self) -> None:
        """Ray reports that the process has ended."""
        self._reported = True
        self._notify(killed=True)

    def _notify(self, *, killed: bool) -> None:
        watchers, self._watchers = self._watchers, []
        for on_end in watchers:
            on_end(killed)

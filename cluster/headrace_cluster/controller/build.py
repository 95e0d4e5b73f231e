"""One build of a replica, as the supervisor knows it."""

import asyncio
from dataclasses import dataclass, field

from headrace_cluster.controller.driver import Progress, RankFacts
from headrace_proto import replica_pb2
from headrace_worker.config import ReplicaStarted


@dataclass(slots=True)
class Build:
    """What is known about one build of a replica beyond the reconciler's record."""

    ranks: list[RankFacts] = field(default_factory=list)
    started: ReplicaStarted | None = None
    health: replica_pb2.ReplicaHealth | None = None
    progress: Progress | None = None
    ended: bool = False  # by itself
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def emptied(self) -> bool:
        """Whether it takes nothing new and has nothing left. Older words of it do not count."""
        health = self.health
        if self.ended or health is None:
            return self.ended or self.started is None  # one that was adopted has not said yet what it holds
        draining = health.state == replica_pb2.REPLICA_STATE_DRAINING
        return draining and not health.load.running and not health.load.waiting

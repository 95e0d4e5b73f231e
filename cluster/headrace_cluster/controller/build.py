"""State of one build of a replica in the supervisor."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace_cluster.core.driver import Progress, RankFacts
from headrace_cluster.core.rank_config import RankReport
from headrace_proto import replica_pb2
from headrace_worker.core.config import ReplicaStarted


@dataclass(slots=True)
class Build:
    """State of one build of a replica beyond the reconciler's record."""

    ranks: list[RankFacts] = field(default_factory=list)
    started: ReplicaStarted | None = None
    reports: Sequence[RankReport] = ()  # of its ranks in order, for the record
    health: replica_pb2.ReplicaHealth | None = None  # the last message
    health_at: float = 0.0  # when it arrived, by the supervisor's clock
    progress: Progress | None = None
    ended: bool = False  # by itself
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def cancel_tasks(self) -> None:
        """All but the current one."""
        for task in self.tasks - {asyncio.current_task()}:
            task.cancel()

    @property
    def is_empty(self) -> bool:
        """Whether it accepts no requests and has none. Health messages from before the drain do not count."""
        health = self.health
        if self.ended or health is None:
            return self.ended or self.started is None  # an adopted build has not reported its requests yet
        draining = health.state == replica_pb2.REPLICA_STATE_DRAINING
        return draining and not health.load.running and not health.load.waiting

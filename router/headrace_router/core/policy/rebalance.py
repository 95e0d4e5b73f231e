"""From which replica to which other one a running stream should move: pure, evaluated several times a second.

Short of KV: requests wait at one replica, or were preempted there since the last check, while another one has free
blocks and an empty queue. Short of time: its steps take much longer than the steps of another one that runs far fewer
streams (as after one was replaced: all streams run on the replicas that survived). A stream that moves has its KV
blocks fetched by its new replica.

Each router moves its own streams only, and waits a random part of PAUSE_SECONDS before the first move: otherwise all
routers would move one at the same time, before the loads show the first move.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace_proto.replica_pb2 import Load
from headrace_router.core.policy.interface import Candidate

# Mean time between two moves away from one replica: the reported loads must include the last one first.
PAUSE_SECONDS = 0.5
COLD_USAGE = 0.6  # KV in use at most on the replica that a stream moves to
USAGE_STEP = 0.2  # at least this much less than on the replica that it leaves
FEWER_STREAMS = 4
SLOWER_STEPS = 1.5
AFTER_LOSS_SECONDS = 5.0  # after a loss, without moves: the streams of the lost replica arrive at the others


@dataclass(slots=True)
class Rebalancer:
    """Keeps counts of preemptions and times of moves. Of one router, which moves its own streams only."""

    jitter: Callable[[], float] = lambda: 0.0  # uniform in [0, 1)
    _preemptions: dict[tuple[str, int], int] = field(default_factory=dict)
    _preempted_at: dict[tuple[str, int], float] = field(default_factory=dict)
    _due: dict[tuple[str, int], float] = field(default_factory=dict)  # of the next move away from a replica
    _not_before: dict[tuple[str, int], float] = field(default_factory=dict)
    _paused_until: float = 0.0

    def replica_lost(self, now: float) -> None:
        """Pauses all moves for AFTER_LOSS_SECONDS."""
        self._paused_until = now + AFTER_LOSS_SECONDS

    def choose_moves(self, members: Sequence[Candidate], now: float) -> list[tuple[int, int]]:
        """Pairs of member indices (from, to): one stream should move for each."""
        moves = []
        for index, member in enumerate(members):
            key = member.build
            short_of_kv = self._is_short_of_kv(member, now)
            if member.load.running < 2 or now < max(self._paused_until, self._not_before.get(key, 0.0)):
                continue
            free = [other for other in range(len(members)) if other != index and _has_capacity(members[other].load)]
            fit = [
                other
                for other in free
                if (short_of_kv and members[other].load.kv_usage <= member.load.kv_usage - USAGE_STEP)
                or _is_slow(member.load, members[other].load)
            ]
            if not fit:
                self._due.pop(key, None)
            elif now >= self._due.setdefault(key, now + self.jitter() * PAUSE_SECONDS):
                del self._due[key]
                self._not_before[key] = now + PAUSE_SECONDS
                moves.append((index, min(fit, key=lambda other: members[other].load.running)))
        return moves

    def _is_short_of_kv(self, member: Candidate, now: float) -> bool:
        key, preempted = member.build, member.load.counters.preemptions
        if preempted > self._preemptions.get(key, preempted):
            self._preempted_at[key] = now
        self._preemptions[key] = preempted
        return member.load.waiting > 0 or now - self._preempted_at.get(key, -PAUSE_SECONDS - 1) <= PAUSE_SECONDS


def _has_capacity(load: Load) -> bool:
    return load.waiting == 0 and load.kv_usage <= COLD_USAGE


def _is_slow(hot: Load, cold: Load) -> bool:
    return hot.running - cold.running >= FEWER_STREAMS and hot.predicted_step_ms > SLOWER_STEPS * cold.predicted_step_ms

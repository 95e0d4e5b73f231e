"""From which replica to which other one a running stream should move: pure, evaluated several times a second.

Short of KV: requests wait at one replica, or were preempted there since the last check, while another one has free
blocks and an empty queue. Short of time: its steps take much longer than the steps of another one that runs far fewer
streams (as after one was replaced: all streams run on the replicas that survived). A stream that moves has its KV
blocks fetched by its new replica.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace_proto.replica_pb2 import Load
from headrace_router.core.policy.interface import Candidate

PAUSE_SECONDS = 0.5  # between two moves away from one replica: the reported loads must include the last one first
COLD_USAGE = 0.6  # KV in use at most on the replica that a stream moves to
USAGE_STEP = 0.2  # at least this much less than on the replica that it leaves
FEWER_STREAMS = 4
SLOWER_STEPS = 1.5


@dataclass(slots=True)
class Rebalancer:
    """Keeps counts of preemptions and times of moves. Of one router, which moves its own streams only."""

    _preemptions: dict[str, int] = field(default_factory=dict)
    _not_before: dict[str, float] = field(default_factory=dict)

    def choose_moves(self, members: Sequence[Candidate], now: float) -> list[tuple[int, int]]:
        """Pairs of member indices (from, to): one stream should move for each."""
        moves = []
        for index, member in enumerate(members):
            seen = self._preemptions.get(member.replica_id)
            preempted = member.load.counters.preemptions
            self._preemptions[member.replica_id] = preempted
            short_of_kv = member.load.waiting > 0 or (seen is not None and preempted > seen)
            if member.load.running < 2 or now < self._not_before.get(member.replica_id, 0.0):
                continue
            free = [other for other in range(len(members)) if other != index and _has_capacity(members[other].load)]
            fit = [
                other
                for other in free
                if (short_of_kv and members[other].load.kv_usage <= member.load.kv_usage - USAGE_STEP)
                or _is_slow(member.load, members[other].load)
            ]
            if fit:
                self._not_before[member.replica_id] = now + PAUSE_SECONDS
                moves.append((index, min(fit, key=lambda other: members[other].load.running)))
        return moves


def _has_capacity(load: Load) -> bool:
    return load.waiting == 0 and load.kv_usage <= COLD_USAGE


def _is_slow(hot: Load, cold: Load) -> bool:
    return hot.running - cold.running >= FEWER_STREAMS and hot.predicted_step_ms > SLOWER_STEPS * cold.predicted_step_ms

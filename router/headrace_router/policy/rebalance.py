"""Which replica should give a running stream to which other one: pure, looked at some times a second.

Short of KV: requests wait at one replica, or were preempted there since the last look, while another one has room and
nobody waits. Short of time: its steps take much longer than those of another one that runs far fewer streams (as after
one was replaced: all streams sit with those that lived). A stream that moves takes its KV blocks with it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace_proto.replica_pb2 import Load

PAUSE_SECONDS = 0.5  # between two moves away from one replica: the loads must show the last one first
COLD_USAGE = 0.6  # KV in use at most where a stream may go
USAGE_STEP = 0.2  # less than where it comes from
FEWER_STREAMS = 4
SLOWER_STEPS = 1.5


class Member(Protocol):
    """A replica that is ready to answer."""

    @property
    def replica_id(self) -> str: ...

    @property
    def load(self) -> Load: ...


@dataclass(slots=True)
class Rebalancer:
    """Remembers preemptions and moves. Of one router, which moves its own streams only."""

    _preemptions: dict[str, int] = field(default_factory=dict)
    _not_before: dict[str, float] = field(default_factory=dict)

    def look(self, members: Sequence[Member], now: float) -> list[tuple[int, int]]:
        """Pairs of indices: from where, to where one stream should move."""
        moves = []
        for index, member in enumerate(members):
            seen = self._preemptions.get(member.replica_id)
            preempted = member.load.counters.preemptions
            self._preemptions[member.replica_id] = preempted
            short_of_kv = member.load.waiting > 0 or (seen is not None and preempted > seen)
            if member.load.running < 2 or now < self._not_before.get(member.replica_id, 0.0):
                continue
            room = [other for other in range(len(members)) if other != index and _has_room(members[other].load)]
            fit = [
                other
                for other in room
                if (short_of_kv and members[other].load.kv_usage <= member.load.kv_usage - USAGE_STEP)
                or _is_slow(member.load, members[other].load)
            ]
            if fit:
                self._not_before[member.replica_id] = now + PAUSE_SECONDS
                moves.append((index, min(fit, key=lambda other: members[other].load.running)))
        return moves


def _has_room(load: Load) -> bool:
    return load.waiting == 0 and load.kv_usage <= COLD_USAGE


def _is_slow(hot: Load, cold: Load) -> bool:
    return hot.running - cold.running >= FEWER_STREAMS and hot.predicted_step_ms > SLOWER_STEPS * cold.predicted_step_ms

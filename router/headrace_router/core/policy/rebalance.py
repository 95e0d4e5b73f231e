"""From which replica to which other one a running stream should move: pure, evaluated several times a second.

Short of KV: requests wait at one replica, or were preempted there since the last check, while another one has free
blocks and an empty queue. Short of time: its steps take much longer than the steps of another one that runs far fewer
streams (as after one was replaced: all streams run on the replicas that survived). A stream that moves has its KV
blocks fetched by its new replica.

Each router moves its own streams only, and waits a random part of PAUSE_SECONDS before the first move: otherwise all
routers would move one at the same time, before the loads show the first move.

One evaluation of N replicas takes O(N); O(N log N) when a stream may move, as those with free capacity are sorted then.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from math import inf

from headrace_router.core.policy.candidate import Candidate

# Mean time between two moves away from one replica: the reported loads must include the last one first.
PAUSE_SECONDS = 0.5
COLD_USAGE = 0.6  # KV in use at most on the replica that a stream moves to
USAGE_STEP = 0.2  # at least this much less than on the replica that it leaves
FEWER_STREAMS = 4
SLOWER_STEPS = 1.5
AFTER_LOSS_SECONDS = 5.0  # after a loss, without moves: the streams of the lost replica arrive at the others

_Best = tuple[float, float]  # running streams and index of the replica that a stream moves to
_NONE: _Best = (inf, inf)


@dataclass(slots=True)
class _Source:
    """What is kept of a replica that streams may leave."""

    preemptions: int
    preempted_at: float = -inf
    due: float | None = None  # of the next move away from it
    not_before: float = 0.0


class Rebalancer:
    """Keeps counts of preemptions and times of moves. Of one router, which moves its own streams only."""

    def __init__(self, jitter: Callable[[], float] = lambda: 0.0) -> None:
        """jitter: uniform in [0, 1)."""
        self._jitter = jitter
        self._sources: dict[tuple[str, int], _Source] = {}
        self._paused_until = 0.0

    def replica_lost(self, now: float) -> None:
        """Pauses all moves for AFTER_LOSS_SECONDS."""
        self._paused_until = now + AFTER_LOSS_SECONDS

    def choose_moves(self, members: Sequence[Candidate], now: float) -> list[tuple[int, int]]:
        """Pairs of member indices (from, to): one stream should move for each."""
        loads = [member.load for member in members]
        running, waiting = [load.running for load in loads], [load.waiting for load in loads]
        usages, steps = [load.kv_usage for load in loads], [load.predicted_step_ms for load in loads]
        targets = _Targets(usages, steps, running, waiting)
        moves = []
        for index, member in enumerate(members):
            source = self._source(member.build, loads[index].counters.preemptions, now)
            if running[index] < 2 or now < source.not_before or now < self._paused_until:
                continue
            best = targets.of_slow(running[index], steps[index])
            if waiting[index] or now - source.preempted_at <= PAUSE_SECONDS:  # short of KV
                best = min(best, targets.of_short(usages[index]))
            if best[1] == inf:
                source.due = None
                continue
            if source.due is None:
                source.due = now + self._jitter() * PAUSE_SECONDS
            if now >= source.due:
                source.due, source.not_before = None, now + PAUSE_SECONDS
                moves.append((index, int(best[1])))
        return moves

    def _source(self, build: tuple[str, int], preemptions: int, now: float) -> _Source:
        source = self._sources.get(build)
        if source is None:
            source = self._sources[build] = _Source(preemptions)
        elif preemptions != source.preemptions:
            if preemptions > source.preemptions:
                source.preempted_at = now
            source.preemptions = preemptions
        return source


class _Targets:
    """The replicas with free capacity, in two orders: the best one for a member is found by bisection.

    A replica never is its own target: it is neither less used nor quicker than itself. One that predicts no time for
    its steps, as a number, is no target for those with slow steps.
    """

    def __init__(
        self, usages: Sequence[float], steps: Sequence[float], running: Sequence[int], waiting: Sequence[int]
    ) -> None:
        """By member: KV in use, milliseconds of the next step, streams that run, requests that wait."""
        self._free = [index for index, usage in enumerate(usages) if usage <= COLD_USAGE and not waiting[index]]
        self._usages, self._steps, self._running = usages, steps, running
        self._slow_from = SLOWER_STEPS * min((steps[index] for index in self._free if steps[index] >= 0), default=inf)

    def of_short(self, usage: float) -> _Best:
        """The best one with USAGE_STEP less KV in use."""
        return self._by_usage.best(bisect_right(self._by_usage.keys, usage - USAGE_STEP))

    def of_slow(self, running: int, step_ms: float) -> _Best:
        """The best one with FEWER_STREAMS less, and much quicker steps."""
        if not step_ms > self._slow_from:
            return _NONE
        best = self._by_step.best(bisect_left(self._by_step.keys, step_ms))
        return best if running - best[0] >= FEWER_STREAMS else _NONE

    @cached_property
    def _by_usage(self) -> "_Order":
        return _Order((self._usages[index], self._running[index], index) for index in self._free)

    @cached_property
    def _by_step(self) -> "_Order":
        steps = self._steps
        return _Order(
            (SLOWER_STEPS * steps[index], self._running[index], index) for index in self._free if steps[index] >= 0
        )


class _Order:
    """Replicas by a key; and which of the first n has the fewest streams, or of several the lowest index."""

    def __init__(self, entries: Iterable[tuple[float, int, int]]) -> None:
        """entries: key, running streams, index."""
        ordered = sorted(entries)
        self.keys = [key for key, _, _ in ordered]
        self._best = list(accumulate(((running, index) for _, running, index in ordered), min, initial=_NONE))

    def best(self, count: int) -> _Best:
        """Of the first `count`."""
        return self._best[count]

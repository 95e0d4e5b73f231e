"""From which replica to which other one a running stream should move: pure, evaluated several times a second.

Short of KV: requests wait at one replica, or were preempted there since the last check, while another one has free
blocks and an empty queue. Short of time: its steps take much longer than the steps of another one that runs far fewer
streams (as after one was replaced: all streams run on the replicas that survived). A stream that moves has its KV
blocks fetched by its new replica.

Each router moves its own streams only, and waits a random part of PAUSE_SECONDS before the first move: otherwise all
routers would move one at the same time, before the loads show the first move.

One evaluation of N replicas takes a few operations over columns of N numbers; those with free capacity are sorted when
a stream may move.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from itertools import accumulate
from math import inf

import numpy as np
from numpy.typing import NDArray

from headrace_router.core.policy.interface import Column, View

# Mean time between two moves away from one replica: the reported loads must include the last one first.
PAUSE_SECONDS = 0.5
COLD_USAGE = 0.6  # KV in use at most on the replica that a stream moves to
USAGE_STEP = 0.2  # at least this much less than on the replica that it leaves
FEWER_STREAMS = 4
SLOWER_STEPS = 1.5
AFTER_LOSS_SECONDS = 5.0  # after a loss, without moves: the streams of the lost replica arrive at the others

Build = tuple[str, int]
_Best = tuple[float, float]  # running streams and index of the replica that a stream moves to
_NONE: _Best = (inf, inf)


class Rebalancer:
    """Keeps the times of moves. Of one router, which moves its own streams only."""

    def __init__(self, jitter: Callable[[], float] = lambda: 0.0) -> None:
        """jitter: uniform in [0, 1)."""
        self._jitter = jitter
        self._due: dict[Build, float] = {}  # when a stream moves away
        self._not_before: dict[Build, float] = {}  # the next one
        self._paused_until = 0.0

    def replica_lost(self, now: float) -> None:
        """Pauses all moves for AFTER_LOSS_SECONDS."""
        self._paused_until = now + AFTER_LOSS_SECONDS

    def choose_moves(self, view: View, now: float) -> list[tuple[int, int]]:
        """Pairs of places of candidates (from, to): one stream should move for each.

        view: the replicas of one model and revision; the times of others are kept.
        """
        if now < self._paused_until:
            return []
        running, waiting, usage, step = (view.of(name) for name in ("running", "waiting", "kv_usage", "last_step_ms"))
        free = np.flatnonzero((usage <= COLD_USAGE) & (waiting == 0))
        timed = free[step[free] >= 0]
        short = (waiting > 0) | (now - view.of("preempted_at") <= PAUSE_SECONDS)
        short &= usage.min(where=_mask(free, usage), initial=inf) <= usage - USAGE_STEP
        slow = step > SLOWER_STEPS * step.min(where=_mask(timed, step), initial=inf)
        slow &= running - running.min(where=_mask(timed, running), initial=inf) >= FEWER_STREAMS
        sources = np.flatnonzero((running >= 2) & (short | slow)).tolist()
        self._not_before = {build: at for build, at in self._not_before.items() if now < at}
        due = self._due
        if due:
            present = {candidate.build for candidate in view.candidates}
            self._due = {build: at for build, at in due.items() if build not in present and now < at + PAUSE_SECONDS}
        targets = _Targets(usage.tolist(), step.tolist(), running.tolist(), free.tolist()) if sources else None
        moves = []
        for place in sources:
            build = view.candidates[place].build
            if targets is None or build in self._not_before:
                continue
            best = targets.of_slow(running[place], step[place])
            if short[place]:
                best = min(best, targets.of_short(usage[place]))
            if best[1] == inf:
                continue
            at = due[build] if build in due else now + self._jitter() * PAUSE_SECONDS
            if now < at:
                self._due[build] = at
            else:
                self._not_before[build] = now + PAUSE_SECONDS
                moves.append((place, int(best[1])))
        return moves


def _mask(places: NDArray[np.int64], like: Column) -> NDArray[np.bool_]:
    mask = np.zeros(len(like), np.bool_)
    mask[places] = True
    return mask


class _Targets:
    """The replicas with free capacity, in two orders: the best one for a member is found by bisection.

    A replica never is its own target: it is neither less used nor quicker than itself. One that predicts no time for
    its steps, as a number, is no target for those with slow steps.
    """

    def __init__(
        self, usages: Sequence[float], steps: Sequence[float], running: Sequence[float], free: Sequence[int]
    ) -> None:
        """By replica: KV in use, milliseconds of the next step, streams that run; the places with free capacity."""
        self._free = free
        self._usages, self._steps, self._running = usages, steps, running
        self._slow_from = SLOWER_STEPS * min((steps[index] for index in self._free if steps[index] >= 0), default=inf)

    def of_short(self, usage: float) -> _Best:
        """The best one with USAGE_STEP less KV in use."""
        return self._by_usage.best(bisect_right(self._by_usage.keys, usage - USAGE_STEP))

    def of_slow(self, running: float, step_ms: float) -> _Best:
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

    def __init__(self, entries: Iterable[tuple[float, float, int]]) -> None:
        """entries: key, running streams, index."""
        ordered = sorted(entries)
        self.keys = [key for key, _, _ in ordered]
        self._best = list(accumulate(((running, index) for _, running, index in ordered), min, initial=_NONE))

    def best(self, count: int) -> _Best:
        """The best of the first `count` replicas."""
        return self._best[count]

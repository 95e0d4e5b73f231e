"""Pauses between retries, and pauses of this process. Pure: the random number is passed in."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses that double from `first` up to `limit` seconds, each shortened by up to half: many retries spread out."""

    first: float
    limit: float

    def seconds(self, failures: int, random: Callable[[], float]) -> float:
        """The pause after this many failures in a row. random: returns a number from 0 to 1."""
        longest = min(self.limit, self.first * 2.0 ** min(failures - 1, 32))
        return longest * (1 - random() / 2)


class Restarts:
    """When a process that was lost starts again: at once, then with pauses that grow with the losses of a window."""

    def __init__(self, backoff: Backoff, window_seconds: float, random: Callable[[], float]) -> None:
        self._backoff = backoff
        self._window_seconds = window_seconds
        self._random = random
        self._losses: list[float] = []

    def lost(self, now: float) -> float:
        """Seconds until the next start."""
        self._losses = [when for when in self._losses if now - when < self._window_seconds]
        earlier = len(self._losses)
        self._losses.append(now)
        return self._backoff.seconds(earlier, self._random) if earlier else 0.0


PAUSE_SECONDS = 1.0  # between two passes: a longer time may be a pause
COMPARED_PASSES = 10


class Pauses:
    """Compares the time between two passes with the last ones: a slow process receives messages, a stopped one none."""

    def __init__(self) -> None:
        self._gaps: deque[float] = deque([0.0], maxlen=COMPARED_PASSES)

    def pause(self, gap: float) -> float:
        """Seconds of the pause in a time between two passes: what exceeds the longest of the last ones."""
        usual = max(self._gaps)
        self._gaps.append(gap)
        return gap - usual if gap > max(PAUSE_SECONDS, usual) else 0.0

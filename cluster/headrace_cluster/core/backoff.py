"""Pauses between retries. Pure: the random number is passed in."""

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

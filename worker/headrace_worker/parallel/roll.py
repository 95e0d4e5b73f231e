"""Who has been heard of lately, counted in one's own ticks: pure, so that a stalled machine accuses nobody."""

from collections.abc import Iterable


class Roll:
    """Silence of each peer, in ticks of the one who listens.

    Time would not do: where the whole machine, or this process, stands still for seconds, everybody seems silent. A
    tick is only counted while this process runs.
    """

    def __init__(self, ranks: Iterable[int], limit: int) -> None:
        self.limit = limit  # ticks that a peer may be silent
        self._silent = dict.fromkeys(ranks, 0)

    def heard(self, rank: int) -> None:
        if rank in self._silent:
            self._silent[rank] = 0

    def left(self, rank: int) -> None:
        """It said that it goes: its silence is none."""
        self._silent.pop(rank, None)

    def tick(self) -> list[int]:
        """One tick has passed; who has been silent for too long."""
        for rank in self._silent:
            self._silent[rank] += 1
        return [rank for rank, ticks in self._silent.items() if ticks > self.limit]

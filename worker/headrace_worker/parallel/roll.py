"""Who has been heard of lately, counted in one's own ticks: pure, so that a stalled machine accuses nobody."""


class Roll:
    """Silence of each peer, in ticks of the one who listens.

    Time would not do: where the whole machine, or this process, stands still for seconds, everybody seems silent. A
    tick is only counted while this process runs.
    """

    def __init__(self, limit: int, parting: int) -> None:
        """`limit`: ticks that a peer may be silent; `parting`: ticks that one may be gone before this rank goes too."""
        self.limit = limit
        self._parting = parting
        self._silent: dict[int, int] = {}
        self._left: set[int] = set()

    def add(self, rank: int) -> None:
        self._silent.setdefault(rank, 0)

    def heard(self, rank: int) -> None:
        if rank in self._silent:
            self._silent[rank] = 0

    def left(self, rank: int) -> None:
        """It said that it goes, which is in order if this rank goes at about the same time."""
        self.heard(rank)
        self._left.add(rank)

    def has_left(self, rank: int) -> bool:
        return rank in self._left

    def strike(self, rank: int) -> None:
        """Its end is known: its silence is none."""
        self._silent.pop(rank, None)

    def tick(self) -> list[int]:
        """One tick has passed; who has been silent for too long. Each is named once."""
        overdue = []
        for rank in list(self._silent):
            self._silent[rank] += 1
            if self._silent[rank] > (self._parting if rank in self._left else self.limit):
                overdue.append(rank)
                self.strike(rank)
        return overdue

"""When each peer was last received from, in this process's own ticks: pure; a stalled machine causes no false alarm."""


class HeartbeatTracker:
    """Ticks since each peer's last frame, counted by this process.

    Wall time would not work: when the whole machine, or this process, stalls for seconds, every peer seems silent. A
    tick is counted only while this process runs.
    """

    def __init__(self, limit: int, parting: int) -> None:
        """`limit`: ticks a peer may be silent; `parting`: ticks between a peer's orderly exit and that of this rank."""
        self.limit = limit
        self._parting = parting
        self._silent: dict[int, int] = {}
        self._left: set[int] = set()

    def add(self, rank: int) -> None:
        self._silent.setdefault(rank, 0)

    def record_frame(self, rank: int) -> None:
        if rank in self._silent:
            self._silent[rank] = 0

    def record_leaving(self, rank: int) -> None:
        """The peer announced its exit, which is orderly if this rank exits at about the same time."""
        self.record_frame(rank)
        self._left.add(rank)

    def has_left(self, rank: int) -> bool:
        return rank in self._left

    def remove(self, rank: int) -> None:
        """The peer's end is known: stop counting its silence."""
        self._silent.pop(rank, None)

    def tick(self) -> list[int]:
        """Count one tick. Returns the ranks that have been silent for too long, each of them once."""
        overdue = []
        for rank in list(self._silent):
            self._silent[rank] += 1
            if self._silent[rank] > (self._parting if rank in self._left else self.limit):
                overdue.append(rank)
                self.remove(rank)
        return overdue

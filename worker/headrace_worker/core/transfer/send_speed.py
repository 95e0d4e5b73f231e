"""How fast the blocks of one pair are sent: measured by the ranks that send them. Pure."""

from dataclasses import dataclass, field

_NEWEST = 0.2  # weight of the newest chunk


@dataclass(slots=True)
class SendSpeed:
    """A moving average for each rank. The slowest one decides: a block is complete when all have sent their part."""

    _ranks: dict[int, float] = field(default_factory=dict)

    def add(self, rank: int, blocks: int, seconds: float) -> None:
        """A rank has sent a chunk."""
        if blocks > 0:
            known, found = self._ranks.get(rank), seconds / blocks
            self._ranks[rank] = found if known is None else known + _NEWEST * (found - known)

    @property
    def block_seconds(self) -> float:
        """0 = not known yet."""
        return max(self._ranks.values(), default=0.0)

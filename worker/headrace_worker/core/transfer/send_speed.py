"""How fast the blocks of one pair are sent: measured by the ranks that send them. Pure."""

from dataclasses import dataclass, field

_OLDER = 0.8  # weight of earlier chunks beside the newest one


@dataclass(slots=True)
class SendSpeed:
    """Recent seconds and blocks of each rank: a short chunk, most of which is fixed cost, counts little.

    The slowest rank decides: a block is complete when all have sent their part.
    """

    _ranks: dict[int, tuple[float, float]] = field(default_factory=dict)  # seconds, blocks

    def add(self, rank: int, blocks: int, seconds: float) -> None:
        """A rank has sent a chunk."""
        if blocks > 0:
            spent, sent = self._ranks.get(rank, (0.0, 0.0))
            self._ranks[rank] = _OLDER * spent + seconds, _OLDER * sent + blocks

    @property
    def block_seconds(self) -> float:
        """0 = not known yet."""
        return max((spent / sent for spent, sent in self._ranks.values()), default=0.0)

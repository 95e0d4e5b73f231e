"""Arithmetic of ranks, stages and places of a replica; pure.

    rank = stage × tp + place      tp 2 × pp 3:   stage 0: 0 1   stage 1: 2 3   stage 2: 4 5

Rank 0 schedules. The first rank of the last stage samples the tokens; with one stage that is rank 0 too.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Topology:
    """One rank's view of a replica of `tp` × `pp` ranks."""

    tp: int
    pp: int
    rank: int

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.tp * self.pp:
            raise ValueError(f"rank {self.rank} is not one of {self.tp} × {self.pp}")

    @property
    def size(self) -> int:
        return self.tp * self.pp

    @property
    def stage(self) -> int:
        return self.rank // self.tp

    @property
    def place(self) -> int:
        """Index of this rank within its stage."""
        return self.rank % self.tp

    @property
    def peers(self) -> list[int]:
        """All ranks of this stage, this one included."""
        return list(range(self.stage * self.tp, (self.stage + 1) * self.tp))

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.pp - 1

    @property
    def before(self) -> int:
        """The rank that sends hidden states to this one: every rank of a stage has all of them."""
        return self.rank - self.tp

    @property
    def after(self) -> int:
        """The rank that receives this rank's hidden states."""
        return self.rank + self.tp

    @property
    def sampler(self) -> int:
        """The rank that samples tokens."""
        return (self.pp - 1) * self.tp

    @property
    def samples(self) -> bool:
        return self.rank == self.sampler

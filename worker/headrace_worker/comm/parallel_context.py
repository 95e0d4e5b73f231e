"""A rank's place in its replica: tensor-parallel peers, pipeline stage, expert split."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:  # also imported where torch is not, to compute sizes
    from torch import Tensor


class Communicator(Protocol):
    """The tensor-parallel ranks of one pipeline stage. All of them make the same calls in the same order."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: "Tensor") -> "Tensor":
        """The sum over the ranks, in place, added in rank order on every rank; returns `tensor`."""
        ...

    def all_gather(self, tensor: "Tensor", dim: int = -1) -> "Tensor":
        """The equally shaped tensors of all ranks, concatenated along `dim`."""
        ...


class SingleRank:
    """The communicator of a single rank: every collective is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: "Tensor") -> "Tensor":
        return tensor

    def all_gather(self, tensor: "Tensor", dim: int = -1) -> "Tensor":
        return tensor


@dataclass(frozen=True, slots=True)
class ParallelContext:
    """Which part of the model this rank holds."""

    tp: Communicator
    pp_rank: int = 0
    pp_size: int = 1
    ep: bool = False  # experts split over the tp ranks instead of each expert sharded

    @property
    def is_first_stage(self) -> bool:
        return self.pp_rank == 0

    @property
    def is_last_stage(self) -> bool:
        return self.pp_rank == self.pp_size - 1


SINGLE = ParallelContext(SingleRank())

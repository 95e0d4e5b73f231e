"""A rank without the others: which part of a model it would hold needs no communication."""

import torch
from torch import Tensor


class IsolatedRank:
    """A rank's index among ranks that do not exist."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """The tensor itself."""
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """A tensor of the shape that the ranks together would have."""
        return torch.cat([tensor] * self.size, dim)

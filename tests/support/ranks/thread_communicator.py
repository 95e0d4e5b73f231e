"""Ranks that are threads of one process and exchange tensors at a barrier: no sockets, no processes."""

import threading

import torch
from torch import Tensor


class ThreadGroup:
    """State shared by the ranks of one group."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=30)
        self.slots: list[Tensor] = [torch.empty(0)] * size


class ThreadCommunicator:
    """A communicator between threads of one process."""

    def __init__(self, rank: int, group: ThreadGroup) -> None:
        self.rank, self.size = rank, len(group.slots)
        self._group = group
        self.calls: list[tuple[str, tuple[int, ...]]] = []

    def _exchange(self, tensor: Tensor) -> list[Tensor]:
        self._group.slots[self.rank] = tensor.clone()
        self._group.barrier.wait()
        parts = list(self._group.slots)
        self._group.barrier.wait()
        assert len({part.shape for part in parts}) == 1
        return parts

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.calls.append(("reduce", tuple(tensor.shape)))
        first, *rest = self._exchange(tensor)
        tensor.copy_(first)
        for part in rest:
            tensor.add_(part)
        return tensor

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        self.calls.append(("gather", tuple(tensor.shape)))
        return torch.cat(self._exchange(tensor), dim)

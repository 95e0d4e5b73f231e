"""The communicators of tensor parallelism: through a group's backend, or through shared memory."""

import torch
from torch import Tensor

from headrace_worker.comm.group import Group


def add_in_order(parts: Tensor, out: Tensor) -> Tensor:
    """out = parts[0] + parts[1] + …, in float32 at least, rounded once. `parts`: [size, *out.shape]."""
    total = parts[0].to(torch.promote_types(parts.dtype, torch.float32), copy=True)
    for part in parts[1:]:
        total += part
    return out.copy_(total)


def join(parts: Tensor, dim: int) -> Tensor:
    """[size, …] as one tensor, the parts concatenated along `dim`."""
    return torch.cat(tuple(parts), dim)


class OrderedCommunicator:
    """Every rank gathers all parts and adds them in rank order: between nodes, and on GPUs with `--deterministic`."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank = group.rank
        self.size = group.size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        return add_in_order(self._group.gather(tensor), tensor)

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return join(self._group.gather(tensor), dim)


class DeviceCommunicator:
    """Between GPUs: NCCL adds in its own order, which is the same on all ranks."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.rank = group.rank
        self.size = group.size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        if tensor.is_contiguous():
            return self._group.reduce(tensor)
        return tensor.copy_(self._group.reduce(tensor.contiguous()))

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return join(self._group.gather(tensor), dim)

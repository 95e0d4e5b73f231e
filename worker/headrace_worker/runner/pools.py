"""The KV pools: one tensor per layer slot, shared by the cache groups."""

import mmap
from contextlib import suppress
from math import prod
from typing import Self

import torch
from torch import Tensor

from headrace_proto.errors import MemoryTooSmallError, ModelUnsupportedError
from headrace_worker.core.layout import CacheLayout
from headrace_worker.model.attention import LayerCache
from headrace_worker.model.load import LoadedModel


class KVPools:
    """The keys and values of one rank: its tensors, and the pool of each of its layers."""

    def __init__(
        self, layout: CacheLayout, num_blocks: int, dtype: torch.dtype, device: torch.device, state_slots: int = 1
    ) -> None:
        """Raises MemoryTooSmallError, ModelUnsupportedError."""
        self.num_blocks = num_blocks
        self.tensors = make_pools(layout, num_blocks, dtype, device)
        self.states = make_states(layout, state_slots, dtype, device)
        self.layers = bind_layers(layout, self.tensors)

    @classmethod
    def of(cls, model: LoadedModel, num_blocks: int, state_slots: int = 1) -> Self:
        """The pools of a loaded model. Raises as the constructor does."""
        return cls(model.layout, num_blocks, model.dtype, model.device.torch_device, state_slots)

    def clear(self, blocks: int) -> None:
        """Zeroes the first blocks."""
        for pool in self.tensors:
            pool[:, :blocks].zero_()


def make_pools(layout: CacheLayout, num_blocks: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Zeroed pools [2, blocks, kv_heads, block_size, head_dim], one per layer slot."""
    group = layout.groups[0]
    if any((other.num_kv_heads, other.head_dim) != (group.num_kv_heads, group.head_dim) for other in layout.groups):
        raise ModelUnsupportedError(
            "Layers with different KV shapes cannot share one pool: this model is not supported."
        )
    shape = (2, num_blocks, group.num_kv_heads, layout.block_size, group.head_dim)
    try:
        return [_zeros(shape, dtype, device) for _ in range(layout.layers_per_group)]
    except (RuntimeError, OSError) as error:  # torch.OutOfMemoryError is a RuntimeError
        needed = num_blocks * layout.block_bytes
        raise MemoryTooSmallError(
            f"The KV cache of {needed / 2**30:.2f} GiB cannot be allocated: give a smaller --kv-cache-memory."
        ) from error


def make_states(
    layout: CacheLayout, slots: int, dtype: torch.dtype, device: torch.device
) -> dict[tuple[int, str], Tensor]:
    """Zeroed states [slots, ...] by layer and kind. Raises MemoryTooSmallError."""
    try:
        return {
            (state.layer, state.kind): _zeros(
                (slots, *state.shape), dtype if state.kind == "conv" else torch.float32, device
            )
            for state in layout.states
        }
    except (RuntimeError, OSError) as error:
        raise MemoryTooSmallError(
            f"{slots} recurrent states of {layout.slot_bytes / 2**20:.1f} MiB cannot be allocated: give a smaller "
            "--max-num-seqs."
        ) from error


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # Anonymous memory reads as zero and is allocated page by page when first written: `torch.zeros` would write it all
    # now, seconds for gigabytes that may never be used. The mapping exists as long as the tensor.
    mapping = mmap.mmap(-1, prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=dtype).view(shape)


def bind_layers(layout: CacheLayout, pools: list[Tensor]) -> dict[int, LayerCache]:
    """Group and pool of every model layer of this rank, by layer index."""
    return {
        layer: LayerCache(group.index, pools[slot], group.window)
        for group in layout.groups
        for slot, layer in enumerate(group.layers)
    }

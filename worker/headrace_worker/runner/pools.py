"""The KV pools: the memory of each slot, shared by the cache groups."""

import mmap
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from math import prod
from typing import Self

import torch
from torch import Tensor

from headrace_base.errors import MemoryTooSmallError
from headrace_kernels import kv_format
from headrace_worker.core.layout import CacheGroupSpec, CacheLayout
from headrace_worker.model.attention import LayerCache
from headrace_worker.model.cache_layout import kv_sources
from headrace_worker.model.load import LoadedModel


class KVPools:
    """The keys and values of one rank: its tensors, and the pool of each of its layers."""

    def __init__(
        self,
        layout: CacheLayout,
        num_blocks: int,
        dtype: torch.dtype,
        device: torch.device,
        state_slots: int = 1,
        sources: Mapping[int, int] | None = None,
    ) -> None:
        """sources: layers that read what another one stores, and which. Raises MemoryTooSmallError."""
        self.num_blocks = num_blocks
        self.tensors = make_pools(layout, num_blocks, dtype, device)
        self.states = make_states(layout, state_slots, dtype, device)
        self.layers = bind_layers(layout, self.tensors, sources)

    @classmethod
    def of(cls, model: LoadedModel, num_blocks: int, state_slots: int = 1) -> Self:
        """The pools of a loaded model. Raises as the constructor does."""
        device, sources = model.device.torch_device, kv_sources(model.config)
        return cls(model.layout, num_blocks, model.dtype, device, state_slots, sources)

    def clear(self, blocks: int) -> None:
        """Zeroes the first blocks."""
        for pool in self.tensors:
            pool[:, :blocks].zero_()


def make_pools(layout: CacheLayout, num_blocks: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Zeroed memory of each slot: keys and values [2, blocks, N], or of different sizes, each [1, blocks, N].

    N: numbers in a block; with a cache of 8 bits, its bytes. Raises MemoryTooSmallError.
    """
    keys, values = (size * layout.block_size for size in layout.slot_entries)
    shapes = [(2, num_blocks, keys)] if keys == values else [(1, num_blocks, size) for size in (keys, values) if size]
    dtype = torch.uint8 if layout.kv_format else dtype
    try:
        return [_zeros(shape, dtype, device) for _ in range(layout.slots) for shape in shapes]
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
            f"{slots} recurrent states of {layout.state_bytes / 2**20:.1f} MiB cannot be allocated: give a smaller "
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


def bind_layers(
    layout: CacheLayout, pools: list[Tensor], sources: Mapping[int, int] | None = None
) -> dict[int, LayerCache]:
    """Group and memory of every model layer of this rank, by layer index.

    sources: layers that read what another one has stored, and which.
    """
    caches = {
        layer: _layer_cache(layout, pools, group, place)
        for group in layout.groups
        for place, layer in enumerate(group.layers)
    }
    shared = {layer: caches[source] for layer, source in (sources or {}).items() if source in caches}
    return caches | {layer: replace(cache, stores=False) for layer, cache in shared.items()}


def _layer_cache(layout: CacheLayout, pools: list[Tensor], group: CacheGroupSpec, place: int) -> LayerCache:
    """The cache of the layer at `place` in its group."""
    slot, place = divmod(place, group.share)
    tensors = pools[slot * len(pools) // layout.slots : (slot + 1) * len(pools) // layout.slots]
    parts = [half for tensor in tensors for half in tensor]  # keys, then values unless they are in the keys
    sizes = [size * layout.block_size for size in group.entries if size]
    memory = tuple(
        part[:, place * size : (place + 1) * size] for part, size in zip(parts, sizes, strict=True)
    )  # [B, N] each
    shape = group.num_kv_heads, layout.block_size, -1
    both = None
    if len(tensors) == 1 and len(sizes) == 2 and sizes[0] == sizes[1]:
        both = tensors[0][..., place * sizes[0] : (place + 1) * sizes[0]]
    if layout.kv_format:
        assert both is not None  # `check_kv_format` refuses others
        pool, scale = kv_format.split(both, group.num_kv_heads, layout.block_size, layout.kv_format)
        return LayerCache(group.index, (pool[0], pool[1]), group.window, pool, scale, memory=memory)
    views = tuple(part.view(len(part), *shape) for part in memory)
    whole = None if both is None else both.view(*both.shape[:2], *shape)
    return LayerCache(group.index, views, group.window, whole, memory=memory)

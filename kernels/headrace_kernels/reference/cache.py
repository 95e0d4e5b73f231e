"""Storing keys and values in the paged cache, in plain torch."""

import torch
from torch import Tensor

from headrace_kernels.kv_format import LARGEST, SMALLEST_SCALE
from headrace_kernels.meta import HeadNorms
from headrace_kernels.reference.elementwise import apply_rope, rms_norm


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [..., D] as (numbers of dtype [..., D], scale [...] float32); ties to even."""
    wide = x.float()
    scale = (wide.abs().amax(-1) / LARGEST[dtype]).clamp(min=SMALLEST_SCALE)
    scaled = wide / scale[..., None]
    return (scaled.round() if dtype is torch.int8 else scaled).to(dtype), scale


def write_kv(key: Tensor, value: Tensor, pool: Tensor, slots: Tensor, kv_scale: Tensor | None = None) -> None:
    """Stores key and value [T, K, D] into the pool [2, B, K, P, D] at ``slots`` [T] (negative ones are skipped)."""
    block_size = pool.shape[3]
    kept = slots >= 0
    if not bool(kept.all()):
        key, value, slots = key[kept], value[kept], slots[kept]
    block, offset = slots // block_size, slots % block_size
    for part, x in enumerate((key, value)):
        if kv_scale is None:
            pool[part, block, :, offset] = x.to(pool.dtype)
        else:
            numbers, scale = quantize(x, pool.dtype)
            pool.view(torch.uint8)[part, block, :, offset] = numbers.view(torch.uint8)  # torch cannot index float8
            kv_scale[part, block, :, offset] = scale


def write_part(rows: Tensor, part: Tensor, slots: Tensor) -> None:
    """Stores rows [T, K, D] into keys or values [B, K, P, D] at ``slots`` [T]; negative ones go to the null block."""
    slots = slots.clamp(min=0)
    part[slots // part.shape[2], :, slots % part.shape[2]] = rows.to(part.dtype)


def rope_write_kv(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cos: Tensor,
    sin: Tensor,
    pool: Tensor,
    slots: Tensor,
    kv_scale: Tensor | None = None,
    norms: HeadNorms | None = None,
) -> Tensor:
    """Rotates query [T, H, D] and key [T, K, D], stores the rotated key and the value, returns the rotated query."""
    if norms is not None:
        query, key = rms_norm(query, norms.query, norms.eps), rms_norm(key, norms.key, norms.eps)
    query, key = apply_rope(query, key, cos, sin)
    write_kv(key, value, pool, slots, kv_scale)
    return query

"""Launches the cache stores: any slot layout, plain or quantized pools; torch for unsupported inputs.

No operations are fused: rotated and quantized values are bit for bit the reference's, norms up to the order of a sum.
"""

import torch
from torch import Tensor

from headrace_kernels.arguments import check_norm, check_rope, check_write
from headrace_kernels.gpu.availability import launches_early
from headrace_kernels.gpu.kernels import cache as kernels
from headrace_kernels.gpu.tensors import FLOATS, halves, power_of_2, quantization, rows, scale_strides
from headrace_kernels.meta import HeadNorms
from headrace_kernels.reference import cache as reference

_WARPS = 4
_LARGEST_TOKEN = 1 << 16  # entries of all heads of a token, which a program holds in registers


def write_kv(key: Tensor, value: Tensor, pool: Tensor, slots: Tensor, kv_scale: Tensor | None = None) -> None:
    check_write(key, value, pool, slots)
    if not _fits(pool, key, value, slots):
        return reference.write_kv(key, value, pool, slots, kv_scale)
    tokens, kv_heads, head_dim = key.shape
    if tokens == 0:
        return None
    key, value = rows(key), rows(value)
    _, block, head, slot, _ = pool.stride()
    kernels.write_kv[(tokens, 2)](
        key, value, *halves(pool, kv_scale), slots.contiguous(),
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        block, head, slot, *scale_strides(kv_scale),
        kv_heads, power_of_2(kv_heads), head_dim, power_of_2(head_dim), pool.shape[3], quantization(pool),
        num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return None


def write_part(new: Tensor, part: Tensor, slots: Tensor) -> None:
    tokens, heads, size = new.shape
    fits = new.dtype in FLOATS and part.dtype in FLOATS and slots.dtype is torch.int64
    if not fits or part.stride(-1) != 1 or _token_size(new) > _LARGEST_TOKEN:
        return reference.write_part(new, part, slots)
    if tokens == 0:
        return None
    new = rows(new)
    block, head, slot, _ = part.stride()
    kernels.write_part[(tokens,)](
        new, part, slots.contiguous(), new.stride(0), new.stride(1), block, head, slot,
        HEADS=heads, HEADS_PAD=power_of_2(heads), SIZE=size, SIZE_PAD=power_of_2(size), BLOCK_SIZE=part.shape[2],
        num_warps=_WARPS,
    )  # fmt: skip
    return None


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
    """See ``headrace_kernels.ops.rope_write_kv``; writes into neither query nor key."""
    check_rope(query, key, cos, sin)
    check_write(key, value, pool, slots)
    if norms is not None:
        check_norm(query, norms.query)
        check_norm(key, norms.key)
    if not _fits(pool, key, value, slots) or not _can_rotate(query, key, cos, sin, norms):
        return reference.rope_write_kv(query, key, value, cos, sin, pool, slots, kv_scale, norms)
    tokens, heads, head_dim = query.shape
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if tokens == 0:
        return out
    kv_heads, half = key.shape[1], cos.shape[-1] // 2
    query, key, value, cos, sin = rows(query), rows(key), rows(value), rows(cos), rows(sin)
    weights = (query, key) if norms is None else (norms.query.contiguous(), norms.key.contiguous())  # or not read
    _, block, head, slot, _ = pool.stride()
    kernels.rope_write_kv[(tokens, 3)](
        out, query, key, value, cos, sin, *weights, *halves(pool, kv_scale), slots.contiguous(),
        query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        cos.stride(0), sin.stride(0), block, head, slot, *scale_strides(kv_scale),
        0.0 if norms is None else norms.eps,
        heads, power_of_2(heads), kv_heads, power_of_2(kv_heads), head_dim, power_of_2(head_dim),
        half, power_of_2(half), power_of_2(head_dim - 2 * half), pool.shape[3], quantization(pool),
        norms is not None, launches_early(),
        num_warps=_WARPS, enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _can_rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, norms: HeadNorms | None) -> bool:
    """Whether the kernels support these: one dtype for all (torch would widen a mixture), and not too many heads."""
    known = query.dtype in FLOATS and query.dtype == key.dtype == cos.dtype == sin.dtype
    known = known and (norms is None or norms.query.dtype == norms.key.dtype == query.dtype)
    return known and _token_size(query) <= _LARGEST_TOKEN and _token_size(key) <= _LARGEST_TOKEN


def _fits(pool: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> bool:
    known = pool.dtype in FLOATS or quantization(pool) != 0
    known = known and key.dtype in FLOATS and value.dtype in FLOATS and slots.dtype is torch.int64
    return known and pool.stride(-1) == 1 and _token_size(key) <= _LARGEST_TOKEN


def _token_size(heads: Tensor) -> int:
    return power_of_2(heads.shape[1]) * power_of_2(heads.shape[2])

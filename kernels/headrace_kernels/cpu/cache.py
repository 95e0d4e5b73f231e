"""The C++ cache store: float32 on a CPU; the rest goes to torch."""

import torch
from torch import Tensor

from headrace_kernels.arguments import check_write
from headrace_kernels.cpu.elementwise import apply_rope, rms_norm
from headrace_kernels.cpu.library import check_status, load, part_of
from headrace_kernels.meta import HeadNorms
from headrace_kernels.reference import cache as reference

_write_kv = load().headrace_write_kv


def write_kv(key: Tensor, value: Tensor, pool: Tensor, slots: Tensor, kv_scale: Tensor | None = None) -> None:
    check_write(key, value, pool, slots)
    if not _fits(key, value, pool, slots):
        return reference.write_kv(key, value, pool, slots, kv_scale)
    key, value, slots = _rows(key), _rows(value), slots.contiguous()
    tokens, kv_heads, head_dim = key.shape
    key_token, key_head, _ = key.stride()
    value_token, value_head, _ = value.stride()
    status = _write_kv(
        key.data_ptr(), key_token, key_head, value.data_ptr(), value_token, value_head, part_of(pool[0]),
        part_of(pool[1]), pool.shape[1], slots.data_ptr(), tokens, kv_heads, head_dim, pool.shape[3],
        torch.get_num_threads(),
    )  # fmt: skip
    check_status("write_kv", status)
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
    """See ``headrace_kernels.ops.rope_write_kv``; rotates in place."""
    if norms is not None:
        query, key = rms_norm(query, norms.query, norms.eps), rms_norm(key, norms.key, norms.eps)
    query, key = apply_rope(query, key, cos, sin)
    write_kv(key, value, pool, slots, kv_scale)
    return query


def _fits(key: Tensor, value: Tensor, pool: Tensor, slots: Tensor) -> bool:
    return (
        pool.dtype is key.dtype is value.dtype is torch.float32
        and slots.dtype is torch.int64
        and (pool.is_cpu and key.is_cpu and value.is_cpu and slots.is_cpu)
        and pool.stride(-1) == 1
    )


def _rows(x: Tensor) -> Tensor:
    """x with contiguous last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()

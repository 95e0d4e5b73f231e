"""The C++ attention: float32 on a CPU, head sizes that are multiples of 16; the rest goes to torch."""

import torch
from torch import Tensor

from headrace_kernels.cpu.library import load
from headrace_kernels.meta import AttentionMeta
from headrace_kernels.reference import attention as reference

_attention = load().headrace_attention
_LANES = 16


def paged_attention(
    query: Tensor,
    pool: Tensor,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    kv_scale: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """See ``headrace_kernels.ops.paged_attention``; always deterministic."""
    tokens, heads, head_dim = query.shape
    if pool.dtype is not torch.float32 or query.dtype is not torch.float32 or head_dim % _LANES or not pool.is_cpu:
        return reference.paged_attention(
            query, pool, meta, scale=scale, window=window, softcap=softcap, sinks=sinks, kv_scale=kv_scale,
            deterministic=deterministic,
        )  # fmt: skip
    query = _rows(query)
    query_token, query_head, _ = query.stride()
    _, blocks, kv_heads, block_size, _ = pool.shape
    tables = meta.block_tables
    sinks = sinks.float().contiguous() if sinks is not None else None
    out = torch.empty(tokens, heads, head_dim)
    _attention(
        out.data_ptr(), query.data_ptr(), query_token, query_head, pool.data_ptr(), blocks,
        meta.query_starts.data_ptr(), meta.seq_lens.data_ptr(), tables.data_ptr(), tables.stride(0), tables.shape[0],
        heads, kv_heads, head_dim, block_size, scale, window, softcap,
        sinks.data_ptr() if sinks is not None else None, torch.get_num_threads(),
    )  # fmt: skip
    return out


def _rows(x: Tensor) -> Tensor:
    """x with contiguous last dimension."""
    return x if x.stride(-1) == 1 else x.contiguous()

"""The C++ attention: float32 on a CPU, head sizes that are multiples of 16, and at most 64 query heads per KV head; the
rest goes to torch.
"""

import torch
from torch import Tensor

from headrace_kernels.arguments import check_attention
from headrace_kernels.cpu.library import UNSUPPORTED, check_status, load
from headrace_kernels.meta import AttentionMeta
from headrace_kernels.reference import attention as reference

_attention = load().headrace_attention


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
    check_attention(query, pool, meta, sinks, window)
    meta = meta.gathered(pool.shape[3])
    if _fits(query, pool, meta):
        tokens, heads, head_dim = query.shape
        query = query if query.stride(2) == 1 else query.contiguous()
        query_token, query_head, _ = query.stride()
        _, blocks, kv_heads, block_size, _ = pool.shape
        tables = meta.block_tables
        logits = sinks.float().cpu().contiguous() if sinks is not None else None
        out = torch.empty(tokens, heads, head_dim)
        status = _attention(
            out.data_ptr(), query.data_ptr(), query_token, query_head, pool.data_ptr(), blocks,
            meta.query_starts.data_ptr(), meta.seq_lens.data_ptr(), tables.data_ptr(), tables.stride(0),
            tables.shape[1], tables.shape[0], tokens, heads, kv_heads, head_dim, block_size, scale, window, softcap,
            logits.data_ptr() if logits is not None else None, torch.get_num_threads(),
        )  # fmt: skip
        if status != UNSUPPORTED:
            check_status("paged_attention", status)
            return out
    return reference.paged_attention(
        query, pool, meta, scale=scale, window=window, softcap=softcap, sinks=sinks, kv_scale=kv_scale,
        deterministic=deterministic,
    )  # fmt: skip


def _fits(query: Tensor, pool: Tensor, meta: AttentionMeta) -> bool:
    starts, lens, tables = meta.query_starts, meta.seq_lens, meta.block_tables
    return (
        query.dtype is pool.dtype is torch.float32
        and starts.dtype is lens.dtype is tables.dtype is torch.int32
        and (query.is_cpu and pool.is_cpu and starts.is_cpu and lens.is_cpu and tables.is_cpu)
        and (pool.is_contiguous() and starts.is_contiguous() and lens.is_contiguous() and tables.stride(1) == 1)
    )

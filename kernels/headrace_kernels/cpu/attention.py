"""The C++ attention: float32 on a CPU, head sizes that are multiples of 16, and at most 64 query heads per KV head, or
any number to one; the rest goes to torch.
"""

import torch
from torch import Tensor

from headrace_kernels.arguments import check_attention, check_selection, check_uneven
from headrace_kernels.cpu.library import UNSUPPORTED, check_status, load, part_of
from headrace_kernels.meta import AttentionMeta
from headrace_kernels.reference import attention as reference

_attention, _select = load().headrace_attention, load().headrace_select_keys
_ROWS = 64  # query heads of a group: MAX_ROWS of attention.cpp


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
    if kv_scale is None and (out := _run(query, pool[0], pool[1], meta, scale, window, softcap, sinks)) is not None:
        return out
    return reference.paged_attention(
        query, pool, meta, scale=scale, window=window, softcap=softcap, sinks=sinks, kv_scale=kv_scale,
        deterministic=deterministic,
    )  # fmt: skip


def uneven_attention(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    deterministic: bool = False,
) -> Tensor:
    """See ``headrace_kernels.ops.uneven_attention``; always deterministic."""
    check_uneven(query, keys, values, meta, sinks, window)
    meta = meta.gathered(keys.shape[2])
    out = _run(query, keys, values, meta, scale, window, softcap, sinks)
    if out is not None:
        return out
    return reference.uneven_attention(
        query, keys, values, meta, scale=scale, window=window, softcap=softcap, sinks=sinks, deterministic=deterministic
    )


def select_keys(query: Tensor, weights: Tensor, keys: Tensor, meta: AttentionMeta, count: int) -> tuple[Tensor, Tensor]:
    """See ``headrace_kernels.ops.select_keys``; always deterministic."""
    check_selection(query, weights, keys, meta, count)
    meta = meta.gathered(keys.shape[2])
    starts, lens, tables = meta.query_starts, meta.seq_lens, meta.block_tables
    if not _fits((query, weights, keys), meta) or keys.stride(3) != 1:
        return reference.select_keys(query, weights, keys, meta, count)
    query, weights = query.contiguous(), weights.contiguous()
    (tokens, heads, size), (blocks, _, block_size, _) = query.shape, keys.shape
    chosen = torch.zeros(tokens, count, dtype=torch.int32)
    found = torch.zeros(tokens, dtype=torch.int32)
    status = _select(
        chosen.data_ptr(), found.data_ptr(), query.data_ptr(), weights.data_ptr(), count, blocks, part_of(keys),
        starts.data_ptr(), lens.data_ptr(), tables.data_ptr(), tables.stride(0), tables.shape[1], tables.shape[0],
        tokens, heads, size, block_size, torch.get_num_threads(),
    )  # fmt: skip
    if status == UNSUPPORTED:
        return reference.select_keys(query, weights, keys, meta, count)
    check_status("select_keys", status)
    return chosen, found


def _fits(floats: tuple[Tensor, ...], meta: AttentionMeta) -> bool:
    """Whether the C++ code was written for these types."""
    starts, lens, tables = numbers = meta.query_starts, meta.seq_lens, meta.block_tables
    return (
        {x.dtype for x in floats} == {torch.float32}
        and {x.dtype for x in numbers} == {torch.int32}
        and all(x.is_cpu for x in (*floats, *numbers))
        and tables.stride(1) == 1
        and starts.is_contiguous()
        and lens.is_contiguous()
    )


def _run(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    meta: AttentionMeta,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> Tensor | None:
    """Shapes as in ``uneven_attention`` -> [T, H, E]; None for what the C++ code was not written for."""
    starts, lens, tables = meta.query_starts, meta.seq_lens, meta.block_tables
    if not _fits((query, keys, values), meta) or not keys.stride(3) == values.stride(3) == 1:
        return None
    query = query if query.stride(2) == 1 else query.contiguous()
    (tokens, heads, size), value_size = query.shape, values.shape[3]
    (query_token, query_head, _), (blocks, kv_heads, block_size, _) = query.stride(), keys.shape
    one_head = kv_heads == 1 and heads > _ROWS
    if one_head:  # in groups that a tile holds
        kv_heads = next(groups for groups in range(2, heads + 1) if heads % groups == 0 and heads // groups <= _ROWS)
    logits = sinks.float().cpu().contiguous() if sinks is not None else None
    out = torch.empty(tokens, heads, value_size)
    status = _attention(
        out.data_ptr(), query.data_ptr(), query_token, query_head, part_of(keys, one_head=one_head),
        part_of(values, one_head=one_head), blocks, starts.data_ptr(), lens.data_ptr(), tables.data_ptr(),
        tables.stride(0), tables.shape[1], tables.shape[0], tokens, heads, kv_heads, size, value_size, block_size,
        scale, window, softcap, logits.data_ptr() if logits is not None else None, torch.get_num_threads(),
    )  # fmt: skip
    if status == UNSUPPORTED:
        return None
    check_status("attention", status)
    return out

"""Checks of shapes at the entry of the native backends: kernels compute addresses from them.

A call with shapes that do not fit each other is refused; one that fits, but that a backend was not written for, is
computed by torch. Tables, lengths and slots are values: the C++ code checks them where it reads them, on a GPU they are
on the device, and its kernels do not check them.
"""

import torch
from torch import Tensor

from headrace_kernels.meta import AttentionMeta, DrawOptions, StateMeta


class KernelArgumentError(ValueError):
    """An op was called with arguments that do not fit each other."""


def check_attention(query: Tensor, pool: Tensor, meta: AttentionMeta, sinks: Tensor | None, window: int) -> None:
    """query [T, H, D], pool [2, B, K, P, D], sinks [H], H a multiple of K."""
    if pool.dim() != 5 or pool.shape[0] != 2 or query.dim() != 3:
        raise _refusal("paged_attention", query, pool)
    check_uneven(query, pool[0], pool[1], meta, sinks, window)


def check_uneven(
    query: Tensor, keys: Tensor, values: Tensor, meta: AttentionMeta, sinks: Tensor | None, window: int
) -> None:
    """query [T, H, D], keys [B, K, P, D], values [B, K, P, E], sinks [H], H a multiple of K."""
    starts, lens, tables = meta.query_starts, meta.seq_lens, meta.block_tables
    dims = (query.dim(), keys.dim(), values.dim(), starts.dim(), lens.dim(), tables.dim())
    if dims != (3, 4, 4, 1, 1, 2):
        raise _refusal("attention", query, keys, values, starts, lens, tables)
    _, heads, head_dim = query.shape
    _, kv_heads, block_size, size = keys.shape
    fits = size == head_dim > 0 and values.shape[:3] == keys.shape[:3] and values.shape[3] > 0
    fits = fits and kv_heads > 0 and block_size > 0 and heads % kv_heads == 0
    if not fits or window < 0 or (sinks is not None and sinks.shape != (heads,)):
        raise _refusal("attention", query, keys, values, *(() if sinks is None else (sinks,)))
    sequences, rows = lens.shape[0], tables if meta.table_rows is None else meta.table_rows
    if starts.shape[0] != sequences + 1 or rows.shape[0] != sequences:
        raise _refusal("attention", starts, lens, tables)


def check_selection(query: Tensor, weights: Tensor, keys: Tensor, meta: AttentionMeta, count: int) -> None:
    """query [T, H, D], weights [T, H], keys [B, 1, P, D]."""
    check_uneven(query, keys, keys, meta, None, 0)
    if keys.shape[1] != 1 or weights.shape != query.shape[:2] or count < 1:
        raise _refusal("select_keys", query, weights, keys)


def check_write(key: Tensor, value: Tensor, pool: Tensor, slots: Tensor) -> None:
    """key and value [T, K, D], pool [2, B, K, P, D], slots [T]."""
    if key.dim() == 3 and pool.dim() == 5 and value.shape == key.shape:
        tokens, kv_heads, head_dim = key.shape
        parts, _, heads, block_size, size = pool.shape
        if (parts, heads, size) == (2, kv_heads, head_dim) and block_size > 0 and slots.shape == (tokens,):
            return
    raise _refusal("write_kv", key, value, pool, slots)


def check_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> None:
    """query [T, H, D], key [T, K, D], cos and sin [T, R], R even and at most D."""
    if query.dim() == key.dim() == 3 and cos.dim() == 2 and cos.shape == sin.shape:
        tokens, rotary_dim = cos.shape
        longest = min(query.shape[2], key.shape[2])
        if query.shape[0] == key.shape[0] == tokens and rotary_dim % 2 == 0 and rotary_dim <= longest:
            return
    raise _refusal("apply_rope", query, key, cos, sin)


def check_norm(x: Tensor, weight: Tensor) -> None:
    """x [..., N], weight [N]."""
    if weight.dim() != 1 or x.dim() == 0 or x.shape[-1] != weight.shape[0] or weight.shape[0] == 0:
        raise _refusal("rms_norm", x, weight)


def check_halves(gate_up: Tensor) -> None:
    """gate_up [..., 2 I]."""
    if gate_up.dim() == 0 or gate_up.shape[-1] % 2 or gate_up.shape[-1] == 0:
        raise _refusal("silu_mul", gate_up)


def check_conv(x: Tensor, weight: Tensor, pool: Tensor, meta: StateMeta, bias: Tensor | None) -> None:
    """x [T, C], weight [C, W], pool [N, W - 1, C], bias [C]."""
    if x.dim() == weight.dim() == 2 and weight.shape[1] > 0:
        channels, width = weight.shape
        fits = x.shape[1] == channels > 0 and pool.shape[1:] == (width - 1, channels) and pool.dim() == 3
        if fits and (bias is None or bias.shape == (channels,)) and _fits_states(meta):
            return
    raise _refusal("causal_conv", x, weight, pool, meta.query_starts, meta.reads, meta.writes)


def check_delta(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, pool: Tensor, meta: StateMeta
) -> None:
    """query, key [T, K, D], value [T, H, E], decay [T, H] or [T, H, D], beta [T, H], pool [N, H, D, E]."""
    if query.dim() == value.dim() == 3 and pool.dim() == 4 and query.shape == key.shape:
        (tokens, key_heads, dim), (heads, columns) = key.shape, value.shape[1:]
        rows = (tokens, heads)
        fits = value.shape[0] == tokens and 0 not in (key_heads, dim, columns) and heads % key_heads == 0
        fits = fits and beta.shape == rows and decay.shape in (rows, (*rows, dim))
        if fits and pool.shape[1:] == (heads, dim, columns) and _fits_states(meta):
            return
    raise _refusal("delta_rule", query, key, value, decay, beta, pool, meta.query_starts, meta.reads, meta.writes)


def _fits_states(meta: StateMeta) -> bool:
    starts, reads, writes = meta.query_starts, meta.reads, meta.writes
    return starts.dim() == reads.dim() == writes.dim() == 1 and len(starts) - 1 == len(reads) == len(writes)


def check_scores(op: str, scores: Tensor) -> None:
    """scores [R, V], V at least 1."""
    if scores.dim() != 2 or scores.shape[1] == 0:
        raise _refusal(op, scores)


def check_draw(logits: Tensor, rows: Tensor, positions: Tensor, options: DrawOptions) -> None:
    """logits [R, V], rows, positions [R] int64, options by row number."""
    integers = (rows, positions, options.integers)
    fits = logits.dim() == 2 and logits.shape[1] > 0 and rows.shape == positions.shape == logits.shape[:1]
    fits = fits and options.numbers.dtype is torch.float32 and {part.dtype for part in integers} == {torch.int64}
    fits = fits and options.numbers.shape[1:] == (3,) and options.integers.shape[1:] == (2,)
    if not fits or not (options.numbers.is_contiguous() and options.integers.is_contiguous()):
        raise _refusal("draw", logits, rows, positions, options.numbers, options.integers)


def check_ssd(
    x: Tensor,
    dt: Tensor,
    decay: Tensor,
    key: Tensor,
    query: Tensor,
    pool: Tensor,
    meta: StateMeta,
    skip: Tensor | None,
    dt_bias: Tensor | None,
) -> None:
    """x [T, H, E], dt [T, H], decay, skip, dt_bias [H], key, query [T, G, D], pool [N, H, E, D] float32."""
    if x.dim() == key.dim() == 3:
        (tokens, heads, channels), (rows, groups, size) = x.shape, key.shape
        fits = rows == tokens and groups > 0 and size > 0 and heads % groups == 0 and query.shape == key.shape
        fits = fits and dt.shape == (tokens, heads) and pool.shape[1:] == (heads, channels, size)
        if fits and all(part is None or part.shape == (heads,) for part in (decay, skip, dt_bias)):
            return _check_states("ssd", pool, meta)
    raise _refusal("ssd", x, dt, decay, key, query, pool)


def check_selective_scan(
    x: Tensor,
    dt: Tensor,
    decay: Tensor,
    key: Tensor,
    query: Tensor,
    pool: Tensor,
    meta: StateMeta,
    skip: Tensor | None,
    gate: Tensor | None,
    dt_bias: Tensor | None,
) -> None:
    """x, dt, gate [T, C], decay [C, D], key, query [T, D], skip, dt_bias [C], pool [N, C, D] float32."""
    if x.dim() == key.dim() == 2:
        (tokens, channels), (rows, size) = x.shape, key.shape
        fits = rows == tokens and size > 0 and query.shape == key.shape and dt.shape == x.shape
        fits = fits and (gate is None or gate.shape == x.shape) and decay.shape == pool.shape[1:] == (channels, size)
        if fits and all(part is None or part.shape == (channels,) for part in (skip, dt_bias)):
            return _check_states("selective_scan", pool, meta)
    raise _refusal("selective_scan", x, dt, decay, key, query, pool)


def _check_states(op: str, pool: Tensor, meta: StateMeta) -> None:
    """A contiguous pool in float32, and slots of every sequence, on one device."""
    tables = (meta.query_starts, meta.reads, meta.writes)
    whole = pool.dtype is torch.float32 and all(part.is_contiguous() for part in (pool, *tables))
    whole = whole and {part.device for part in tables} == {pool.device}
    sequences = meta.reads.shape[0]
    shapes = meta.query_starts.shape == (sequences + 1,) and meta.writes.shape == (sequences,)
    if not whole or not shapes or {table.dtype for table in tables} != {torch.int32}:
        raise _refusal(op, pool, *tables)


def check_gated_norm(x: Tensor, gate: Tensor, weight: Tensor, group: int | None) -> None:
    """x, gate [..., N], weight [N], N a multiple of the group."""
    check_norm(x, weight)
    if gate.shape != x.shape or (group is not None and (group < 1 or weight.shape[0] % group)):
        raise _refusal("gated_rms_norm", x, gate, weight)


def _refusal(op: str, *tensors: Tensor) -> KernelArgumentError:
    given = ", ".join(f"{tensor.dtype} {list(tensor.shape)}" for tensor in tensors)
    return KernelArgumentError(f"{op}: its arguments do not fit each other: {given} (see headrace_kernels.ops).")

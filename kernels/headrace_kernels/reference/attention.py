"""Attention over a paged cache in plain torch, vectorised over sequences."""

import torch
from torch import Tensor

from headrace_kernels.meta import AttentionMeta


def write_kv(key: Tensor, value: Tensor, pool: Tensor, slots: Tensor) -> None:
    """Stores key and value [T, K, D] into the pool [2, B, K, P, D] at ``slots`` [T] (negative ones are skipped)."""
    block_size = pool.shape[3]
    kept = slots >= 0
    if not bool(kept.all()):
        key, value, slots = key[kept], value[kept], slots[kept]
    block, offset = slots // block_size, slots % block_size
    pool[0, block, :, offset] = key.to(pool.dtype)
    pool[1, block, :, offset] = value.to(pool.dtype)


def paged_attention(
    query: Tensor,
    pool: Tensor,
    meta: AttentionMeta,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """Causal attention of query [T, H, D] over the pool [2, B, K, P, D]; see ``headrace_kernels.ops``.

    Sequences are padded to the longest of their bucket, where a bucket holds query lengths of one power of two: decode
    rows are never padded to the length of a prefill chunk, and the work is at most about twice the necessary.
    """
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    query_lens = (meta.query_starts[1:] - meta.query_starts[:-1]).long()
    buckets = torch.frexp((query_lens * 2 - 1).clamp(min=0).float())[1]  # 1 | 2 | 3-4 | 5-8 | ...
    for bucket in sorted(set(buckets.tolist())):
        members = ((buckets == bucket) & (query_lens > 0)).nonzero().flatten()
        if len(members):
            _attend_bucket(out, query, pool, meta, members, query_lens[members], scale, window, softcap, sinks)
    return out


def _attend_bucket(
    out: Tensor,
    query: Tensor,
    pool: Tensor,
    meta: AttentionMeta,
    members: Tensor,
    query_lens: Tensor,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
) -> None:
    device = query.device
    num_heads = query.shape[1]
    num_kv_heads, block_size = pool.shape[2:4]
    group = num_heads // num_kv_heads
    seq_lens = meta.seq_lens[members].long()

    token = torch.arange(int(query_lens.max()), device=device)
    present_SQ = token < query_lens[:, None]
    token_SQ = meta.query_starts[members].long()[:, None] + torch.minimum(token, query_lens[:, None] - 1)
    q = query[token_SQ].float().view(*token_SQ.shape, num_kv_heads, group, -1)  # [S, Q, K, G, D]
    query_pos_SQ = (seq_lens - query_lens)[:, None] + token

    first = (seq_lens - query_lens + 1 - window).clamp(min=0) if window else torch.zeros_like(seq_lens)
    span = int((seq_lens - first).max())
    key_pos_SL = first[:, None] + torch.arange(span, device=device)
    exists_SL = key_pos_SL < seq_lens[:, None]
    # Padding re-reads the sequence's own last key: never a block that belongs to somebody else.
    read_SL = torch.minimum(key_pos_SL, seq_lens[:, None] - 1)
    block_SL = meta.block_tables[members].long().gather(1, read_SL // block_size)
    keys, values = pool[:, block_SL, :, read_SL % block_size].float().unbind(2)  # [S, L, K, D] each

    scores = torch.einsum("sqkgd,slkd->skgql", q, keys) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = (key_pos_SL[:, None] <= query_pos_SQ[..., None]) & exists_SL[:, None]  # [S, Q, L]
    if window:
        seen &= key_pos_SL[:, None] > query_pos_SQ[..., None] - window
    scores = scores.masked_fill(~seen[:, None, None], float("-inf"))
    peak = scores.amax(-1, keepdim=True)
    if sinks is not None:
        sink = sinks.float().view(1, num_kv_heads, group, 1, 1)
        peak = torch.maximum(peak, sink)
    weights = torch.exp(scores - peak)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sink - peak)
    mixed = torch.einsum("skgql,slkd->sqkgd", weights / total, values)
    out[token_SQ[present_SQ]] = mixed.flatten(2, 3)[present_SQ].to(out.dtype)

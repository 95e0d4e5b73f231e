"""Attention over a paged cache in plain torch, vectorised over sequences."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from headrace_kernels.meta import AttentionMeta

_SCORES = 1 << 25  # scores of tokens and keys that are selected from at once
_NUMBERS = 1 << 27  # numbers in the keys of several sequences that are read at once


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
    """Causal attention of query [T, H, D] over the pool [2, B, K, P, D]; see ``headrace_kernels.ops``.

    Deterministic: one token at a time, which is slow. Else sequences are padded to the longest of their bucket, where a
    bucket holds query lengths of one power of two: decode rows are never padded to the length of a prefill chunk, and
    at most about twice the necessary work is done.
    """
    scales = (None, None) if kv_scale is None else (kv_scale[0], kv_scale[1])
    return _attend(
        query, (pool[0], pool[1]), scales, meta, scale=scale, window=window, softcap=softcap, sinks=sinks,
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
    """As `paged_attention`, over keys [B, K, P, D] and values [B, K, P, E]."""
    return _attend(
        query, (keys, values), (None, None), meta, scale=scale, window=window, softcap=softcap, sinks=sinks,
        deterministic=deterministic,
    )  # fmt: skip


def select_keys(query: Tensor, weights: Tensor, keys: Tensor, meta: AttentionMeta, count: int) -> tuple[Tensor, Tensor]:
    block_size = keys.shape[2]
    meta = meta.gathered(block_size)
    table = torch.zeros(len(query), count, dtype=torch.int32, device=query.device)
    lens = table.new_zeros(len(query))
    starts, lengths = meta.query_starts.tolist(), meta.seq_lens.tolist()
    for s, (start, end, length) in enumerate(zip(starts, starts[1:], lengths, strict=False)):
        if start == end or length == 0:
            continue
        position = torch.arange(length, device=query.device)
        block, offset = meta.block_tables[s].long()[position // block_size], position % block_size
        cached, places = keys[block, 0, offset].float(), torch.cat((block * block_size + offset, block.new_zeros(1)))
        rows = max(1, _SCORES // length)
        for first in range(start, end, rows):
            some = slice(first, min(end, first + rows))
            scores = torch.zeros(some.stop - first, length, device=query.device)
            heads = query[some].float().transpose(0, 1)
            for head, weight in zip(heads, weights[some].float().T, strict=True):
                scores += weight[:, None] * (head @ cached.T).clamp(min=0)
            own = torch.arange(length - (end - first) + 1, length - (end - some.stop) + 1, device=query.device)[:, None]
            scores.masked_fill_(position >= own, float("-inf"))
            best = scores.sort(stable=True, dim=-1, descending=True)[1][:, :count]
            best = torch.where(best < own, best, length).sort(-1)[0]
            table[some, : best.shape[1]] = places[best].int()
            lens[some] = own[:, 0].clamp(max=count)
    return table, lens


def _attend(
    query: Tensor,
    parts: tuple[Tensor, Tensor],
    scales: tuple[Tensor | None, Tensor | None],
    meta: AttentionMeta,
    *,
    scale: float,
    window: int,
    softcap: float,
    sinks: Tensor | None,
    deterministic: bool,
) -> Tensor:
    """parts: keys and values. scales: of both, where they are quantized."""
    out = query.new_zeros(*query.shape[:2], parts[1].shape[3])
    if deterministic and len(query) > 1:
        for token, alone in _token_by_token(meta):
            row = slice(token, token + 1)
            out[row] = _attend(
                query[row], parts, scales, alone, scale=scale, window=window, softcap=softcap, sinks=sinks,
                deterministic=False,
            )  # fmt: skip
        return out
    query_lens = (meta.query_starts[1:] - meta.query_starts[:-1]).long()
    buckets = torch.frexp((query_lens * 2 - 1).clamp(min=0).float())[1]  # 1 | 2 | 3-4 | 5-8 | ...
    for bucket in sorted(set(buckets.tolist())):
        members = ((buckets == bucket) & (query_lens > 0) & (meta.seq_lens > 0)).nonzero().flatten()
        at_once = max(1, _NUMBERS // (meta.max_seq_len * parts[0][0, :, 0].numel()))
        for some in members.split(at_once) if len(members) else ():
            lens = query_lens[some]
            _attend_bucket(out, query, parts, scales, meta, some, lens, scale, window, softcap, sinks)
    return out


def _token_by_token(meta: AttentionMeta) -> Iterator[tuple[int, AttentionMeta]]:
    """Each token of the step with a separate meta, in which it is the last of its sequence."""
    starts, lens = meta.query_starts.tolist(), meta.seq_lens.tolist()
    for s, (start, end, seq_len) in enumerate(zip(starts, starts[1:], lens, strict=False)):
        for token in range(start, end) if seq_len else ():
            length = seq_len - (end - 1 - token)
            alone = replace(
                meta,
                query_starts=meta.query_starts.new_tensor([0, 1]),
                seq_lens=meta.seq_lens.new_tensor([length]),
                block_tables=meta.block_tables[s : s + 1],
                max_query_len=1,
                max_seq_len=length,
            )
            yield token, alone


def _attend_bucket(
    out: Tensor,
    query: Tensor,
    parts: tuple[Tensor, Tensor],
    scales: tuple[Tensor | None, Tensor | None],
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
    num_kv_heads, block_size = parts[0].shape[1:3]
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
    # Padding re-reads the sequence's own last key: never a block of another sequence.
    read_SL = torch.minimum(key_pos_SL, seq_lens[:, None] - 1)
    block_SL = meta.block_tables[members].long().gather(1, read_SL // block_size)
    offset_SL = read_SL % block_size
    keys, values = (_read(*part, block_SL, offset_SL) for part in zip(parts, scales, strict=True))

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


def _read(part: Tensor, scale: Tensor | None, block: Tensor, offset: Tensor) -> Tensor:
    """Reads the entries at places [S, L] of keys or values [B, K, P, D] -> [S, L, K, D] float32."""
    if scale is None:
        return part[block, :, offset].float()
    read = part.view(torch.uint8)[block, :, offset].view(part.dtype).float()  # torch cannot index float8
    return read * scale[block, :, offset][..., None]

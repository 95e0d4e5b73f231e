"""Attention whose bits do not depend on the batch: keys are summed in chunks at absolute positions, merged in order.

A prompt's program iterates over the chunks of its tile; a decode step's chunks are divided among programs (SPLIT), and
`merge_ordered` does the same operations on what they stored.
"""

import triton
import triton.language as tl

from headrace_kernels.gpu.kernels.attention import attend_tiles, finish, fold, key_range, load_query, zero_padding
from headrace_kernels.gpu.kernels.plan import sequences_of


@triton.jit
def chunks_of(low, end, CHUNK: tl.constexpr):
    """(the first chunk, the number of chunks) of the keys [low, end)."""
    begin = low // CHUNK
    return begin, tl.maximum((end + CHUNK - 1) // CHUNK - begin, 1)


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "table_stride", "splits", "window"])
def attend_ordered(
    out, part_mixed, part_peak, part_total, query, keys, values, key_scales, value_scales, sinks,
    query_starts, seq_lens, tables, table_rows, scale, softcap, window, num_seqs, num_tokens, splits,
    query_token, query_head, table_stride, block_stride, head_stride, slot_stride, value_block, value_head, value_slot,
    scale_block_stride, scale_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, REST: tl.constexpr,
    REST_PAD: tl.constexpr, SHARED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr, SHORT: tl.constexpr,
    SPLIT: tl.constexpr, ZERO_TAIL: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, QUANT: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (sequences if SPLIT else query tiles, KV heads, programs of a tile if SPLIT else 1)."""
    kv_head = tl.program_id(1)
    piece = tl.program_id(2)
    row = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_PAD)
    head = kv_head * GROUP + row % GROUP
    inside = (d < HEAD_DIM)[None, :]

    if ZERO_TAIL:  # the first program of a tile does it
        zero_padding(
            out, tl.program_id(0) * TILE_TOKENS + row // GROUP, head, piece * BLOCK_M, query_starts, num_seqs,
            num_tokens, HEADS, GROUP, HEAD_DIM, TILE_TOKENS, BLOCK_M, D_PAD,
        )  # fmt: skip

    if SPLIT:
        seq = tl.program_id(0)
        first = 0
    else:
        tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest contexts first
        seq = sequences_of(tile, query_starts, num_seqs, TILE_TOKENS)
        first = (tile - seq - tl.load(query_starts + seq) // TILE_TOKENS) * TILE_TOKENS
    start = tl.load(query_starts + seq)
    query_len = tl.load(query_starts + seq + 1) - start
    seq_len = tl.load(seq_lens + seq)
    if SPLIT:
        if (query_len == 0) | (query_len > TILE_TOKENS):
            return
    else:
        if (first >= query_len) | (query_len <= SHORT):
            return

    last = tl.minimum(first + TILE_TOKENS, query_len) - 1
    low, end = key_range(seq_len, query_len, first, last, window, HAS_WINDOW)
    begin, chunks = chunks_of(low, end, CHUNK)
    if SPLIT:
        if piece >= chunks:
            return

    token = first + row // GROUP
    known = (row < TILE_TOKENS * GROUP) & (token < query_len)
    position = seq_len - query_len + token
    q = load_query(query, start + token, head, known, query_token, query_head, HEAD_DIM, D_PAD, COMPUTE)
    q_rest = q
    if REST:
        q_rest = load_query(
            query + HEAD_DIM, start + token, head, known, query_token, query_head, REST, REST_PAD, COMPUTE
        )
    table = tables + tl.load(table_rows + seq).to(tl.int64) * table_stride
    keys += kv_head.to(tl.int64) * head_stride
    values += kv_head.to(tl.int64) * value_head
    if QUANT:
        key_scales += kv_head * scale_head
        value_scales += kv_head * scale_head
    end_tile = (end + BLOCK_N - 1) // BLOCK_N
    part = ((seq.to(tl.int64) * tl.num_programs(1) + kv_head) * (TILE_TOKENS * GROUP) + row) * splits

    mixed = tl.full([BLOCK_M, D_PAD], 0.0, tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    step = tl.num_programs(2) if SPLIT else 1
    for chunk in range(piece, chunks, step):
        more, more_peak, more_total = attend_tiles(
            q, q_rest, position, 0, 0, tl.maximum((begin + chunk) * (CHUNK // BLOCK_N), low // BLOCK_N),
            tl.minimum((begin + chunk + 1) * (CHUNK // BLOCK_N), end_tile), low, end, table, keys, values, key_scales,
            value_scales, scale, softcap, window, block_stride, slot_stride, value_block, value_slot,
            scale_block_stride, HEAD_DIM, D_PAD, REST, REST_PAD, BLOCK_SIZE, BLOCK_M, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP,
            SHARED, QUANT, COMPUTE, PRECISION, False,
        )  # fmt: skip
        mixed, peak, total = fold(mixed, peak, total, more, more_peak, more_total)
        if SPLIT:
            if chunks > 1:
                at = part + chunk
                tl.store(part_mixed + at[:, None] * HEAD_DIM + d[None, :], more, mask=known[:, None] & inside)
                tl.store(part_peak + at, more_peak, mask=known)
                tl.store(part_total + at, more_total, mask=known)
    if SPLIT:
        if chunks > 1:
            return
    into = out + ((start + token).to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    done = finish(mixed, peak, total, sinks, head, known, HAS_SINKS)
    tl.store(into, done.to(out.dtype.element_ty), mask=known[:, None] & inside)


@triton.jit(do_not_specialize=["splits", "window"])
def merge_ordered(
    out, part_mixed, part_peak, part_total, sinks, query_starts, seq_lens, window, splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, TILE_TOKENS: tl.constexpr,
    CHUNK: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Merges the chunks of split rows. Grid: (sequences, KV heads, rows of a tile)."""
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    start = tl.load(query_starts + seq)
    query_len = tl.load(query_starts + seq + 1) - start
    token = row // GROUP
    if (query_len > TILE_TOKENS) | (token >= query_len):
        return
    low, end = key_range(tl.load(seq_lens + seq), query_len, 0, query_len - 1, window, HAS_WINDOW)
    _, chunks = chunks_of(low, end, CHUNK)
    if chunks == 1:
        return
    d = tl.arange(0, D_PAD)
    one = tl.arange(0, 1)
    inside = (d < HEAD_DIM)[None, :]
    part = ((seq.to(tl.int64) * tl.num_programs(1) + kv_head) * (TILE_TOKENS * GROUP) + row) * splits
    mixed = tl.full([1, D_PAD], 0.0, tl.float32)
    peak = tl.full([1], float("-inf"), tl.float32)
    total = tl.full([1], 0.0, tl.float32)
    for chunk in range(0, chunks):
        at = part + chunk + one
        more = tl.load(part_mixed + at[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
        mixed, peak, total = fold(mixed, peak, total, more, tl.load(part_peak + at), tl.load(part_total + at))
    head = kv_head * GROUP + row % GROUP + one
    done = finish(mixed, peak, total, sinks, head, one == 0, HAS_SINKS)
    place = out + ((start + token).to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(place, done.to(out.dtype.element_ty), mask=inside)

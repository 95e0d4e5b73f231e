"""Merges the pieces of split attention rows."""

import triton
import triton.language as tl

from headrace_kernels.gpu.kernels.attention import finish, fold, key_range, split_plan


@triton.jit(do_not_specialize=["splits", "window"])
def merge(
    out, part_mixed, part_peak, part_total, sinks, query_starts, seq_lens, window, splits,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, TILE_TOKENS: tl.constexpr,
    BLOCK_N: tl.constexpr, MIN_TILES: tl.constexpr, CHUNK: tl.constexpr, SPLITS_PAD: tl.constexpr,
    ORDERED: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Merges the pieces of split rows. Grid: (sequences, KV heads, rows of a tile)."""
    seq = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2)
    start = tl.load(query_starts + seq)
    query_len = tl.load(query_starts + seq + 1) - start
    token = row // GROUP
    if (query_len > TILE_TOKENS) | (token >= query_len):
        return
    seq_len = tl.load(seq_lens + seq)
    low, end = key_range(seq_len, query_len, 0, query_len - 1, window, HAS_WINDOW)
    begin, each, pieces = split_plan(low, end, splits, BLOCK_N, MIN_TILES, CHUNK, ORDERED)
    if pieces == 1:
        return
    d = tl.arange(0, D_PAD)
    one = tl.arange(0, 1)
    inside = (d < HEAD_DIM)[None, :]
    part = ((seq.to(tl.int64) * tl.num_programs(1) + kv_head) * (TILE_TOKENS * GROUP) + row) * splits
    if ORDERED:
        mixed = tl.full([1, D_PAD], 0.0, tl.float32)
        peak = tl.full([1], float("-inf"), tl.float32)
        total = tl.full([1], 0.0, tl.float32)
        for chunk in range(0, pieces):
            at = part + chunk + one
            more = tl.load(part_mixed + at[:, None] * HEAD_DIM + d[None, :], mask=inside, other=0.0)
            mixed, peak, total = fold(mixed, peak, total, more, tl.load(part_peak + at), tl.load(part_total + at))
    else:
        piece = tl.arange(0, SPLITS_PAD)
        valid = piece < pieces
        peaks = tl.load(part_peak + part + piece, mask=valid, other=float("-inf"))
        totals = tl.load(part_total + part + piece, mask=valid, other=0.0)
        parts = tl.load(
            part_mixed + (part + piece)[:, None] * HEAD_DIM + d[None, :], mask=valid[:, None] & inside, other=0.0
        )
        top = tl.max(peaks, 0)
        base = tl.where(top == float("-inf"), 0.0, top)
        shares = tl.exp2(peaks - base)
        mixed = tl.sum(parts * shares[:, None], 0)[None, :]
        total = tl.sum(totals * shares, 0) + one.to(tl.float32)
        peak = top + one.to(tl.float32)
    head = kv_head * GROUP + row % GROUP + one
    done = finish(mixed, peak, total, sinks, head, one == 0, HAS_SINKS)
    place = out + ((start + token).to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    tl.store(place, done.to(out.dtype.element_ty), mask=inside)

"""Paged attention over the pieces of a plan: decode steps, prompts, and prompts after a cached beginning alike.

A program computes one piece: a tile of query rows over a range of key tiles. Where a tile has several pieces, each
stores its softmax state, and the program that is the last to finish merges them, in their order: the result does not
depend on which one that is.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from headrace_kernels.gpu.kernels.attention import attend_tiles, finish, key_range, load_query, zero_padding
from headrace_kernels.gpu.kernels.plan import FIELDS


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "table_stride", "window"])
def attend(
    out, pieces, counters, part_mixed, part_peak, part_total, query, keys, values, key_scales, value_scales, sinks,
    query_starts, seq_lens, tables, table_rows, scale, softcap, window, num_seqs, num_tokens,
    query_token, query_head, table_stride, block_stride, head_stride, slot_stride, value_block, value_head, value_slot,
    scale_block_stride, scale_head,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, REST: tl.constexpr,
    REST_PAD: tl.constexpr, SHARED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ZERO_TAIL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    QUANT: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, MOST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: (pieces, KV heads). part_mixed [slots, K, BLOCK_M, D], part_peak and part_total [slots, K, BLOCK_M].

    EARLY: it is launched while the kernel before it runs, and reads nothing before that one is done.
    """
    if EARLY:
        gdc_wait()
    kv_head = tl.program_id(1)
    heads = tl.num_programs(1)
    row = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_PAD)
    head = kv_head * GROUP + row % GROUP
    inside = (d < HEAD_DIM)[None, :]

    if ZERO_TAIL:
        zero_padding(
            out, tl.program_id(0) * TILE_TOKENS + row // GROUP, head, 0, query_starts, num_seqs, num_tokens,
            HEADS, GROUP, HEAD_DIM, TILE_TOKENS, BLOCK_M, D_PAD,
        )  # fmt: skip

    pieces += (tl.num_programs(0) - 1 - tl.program_id(0)) * FIELDS  # the longest contexts of a prompt first
    seq = tl.load(pieces)
    if seq < 0:
        return
    first = tl.load(pieces + 1)
    first_tile = tl.load(pieces + 2)
    end_tile = tl.load(pieces + 3)
    slot = tl.load(pieces + 4)
    first_slot = tl.load(pieces + 5)
    count = tl.load(pieces + 6)
    start = tl.load(query_starts + seq)
    query_len = tl.load(query_starts + seq + 1) - start
    seq_len = tl.load(seq_lens + seq)
    last = tl.minimum(first + TILE_TOKENS, query_len) - 1
    low, end = key_range(seq_len, query_len, first, last, window, HAS_WINDOW)

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
    mixed, peak, total = attend_tiles(
        q, q_rest, position, seq_len - query_len + first, seq_len - query_len + last, first_tile, end_tile, low, end,
        table, keys, values, key_scales, value_scales, scale, softcap, window, block_stride, slot_stride, value_block,
        value_slot, scale_block_stride,
        HEAD_DIM, D_PAD, REST, REST_PAD, BLOCK_SIZE, BLOCK_M, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, SHARED, QUANT,
        COMPUTE, PRECISION, QUANT > 0,
    )  # fmt: skip
    if count > 1:
        part = (slot.to(tl.int64) * heads + kv_head) * BLOCK_M + row
        tl.store(part_mixed + part[:, None] * HEAD_DIM + d[None, :], mixed, mask=known[:, None] & inside)
        tl.store(part_peak + part, peak)
        tl.store(part_total + part, total)
        tl.debug_barrier()  # all of this program's stores come before its mark
        counter = counters + tl.load(pieces + 7) * heads + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") != count - 1:
            return
        tl.store(counter, 0)  # for the next layer
        # The shares first, so that no piece's values wait for those of the one before.
        part = (first_slot.to(tl.int64) * heads + kv_head) * BLOCK_M
        number = tl.arange(0, MOST)
        each = part + number[:, None] * (heads * BLOCK_M) + row[None, :]
        peaks = tl.load(part_peak + each, mask=(number < count)[:, None], other=float("-inf"))
        totals = tl.load(part_total + each, mask=(number < count)[:, None], other=0.0)
        peak = tl.max(peaks, 0)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        total = tl.sum(totals * tl.exp2(peaks - base[None, :]), 0)
        mixed = tl.full([BLOCK_M, D_PAD], 0.0, tl.float32)
        for one in tl.range(0, count, loop_unroll_factor=4):
            at = part + one * (heads * BLOCK_M) + row
            share = tl.exp2(tl.load(part_peak + at) - base)
            keep = known[:, None] & inside
            mixed += tl.load(part_mixed + at[:, None] * HEAD_DIM + d[None, :], mask=keep, other=0.0) * share[:, None]
    into = out + ((start + token).to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    done = finish(mixed, peak, total, sinks, head, known, HAS_SINKS)
    tl.store(into, done.to(out.dtype.element_ty), mask=known[:, None] & inside)

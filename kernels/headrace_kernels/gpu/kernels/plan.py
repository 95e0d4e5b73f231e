"""Divides the attention of one step into pieces of work of about equal size, on the device, once for all layers.

A tile is up to TILE_TOKENS tokens of one sequence, with all query heads of a KV head; its keys are cut into pieces, so
that a long context is read by many programs. A share is the number of key tiles in the step, divided by the wanted
number of pieces; a query tile whose keys are no more than a share is one piece.
"""

import triton
import triton.language as tl

from headrace_kernels.gpu.kernels.attention import key_range

FIELDS = tl.constexpr(8)  # fields of a piece: see `plan`


@triton.jit
def sequences_of(tile, query_starts, num_seqs, TILE_TOKENS: tl.constexpr):
    """The sequences [N] of query tiles [N]: sequence s begins at tile ``query_starts[s] // TILE_TOKENS + s``."""
    low = tile * 0
    high = low + num_seqs
    for _ in range(32):
        inside = low < high
        middle = (low + high) // 2
        before = inside & (tl.load(query_starts + middle, mask=inside, other=0) // TILE_TOKENS + middle <= tile)
        low = tl.where(before, middle + 1, low)
        high = tl.where(inside & (before == 0), middle, high)
    return low - 1


@triton.jit
def tiles_of(
    tile, query_starts, seq_lens, num_seqs, window, TILE_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr,
    SHORT: tl.constexpr, LONG: tl.constexpr, HAS_WINDOW: tl.constexpr,
):  # fmt: skip
    """(sequence, first token, first key tile, number of key tiles) of query tiles [N]; 0 key tiles: there is none."""
    seq = tile
    if LONG:
        seq = sequences_of(tile, query_starts, num_seqs, TILE_TOKENS)
    known = (seq >= 0) & (seq < num_seqs)
    start = tl.load(query_starts + seq, mask=known, other=0).to(tl.int32)
    query_len = tl.load(query_starts + seq + 1, mask=known, other=0).to(tl.int32) - start
    seq_len = tl.load(seq_lens + seq, mask=known, other=0).to(tl.int32)
    if LONG:
        first = (tile - seq - start // TILE_TOKENS) * TILE_TOKENS
        known = known & (query_len > SHORT) & (first < query_len)
    else:
        first = tile * 0
        known = known & (query_len > 0) & (query_len <= SHORT)
    last = tl.minimum(first + TILE_TOKENS, query_len) - 1
    low, end = key_range(seq_len, query_len, first, last, window, HAS_WINDOW)
    begin = low // BLOCK_N
    # One at least: a sequence without keys gives zeros.
    return seq, first, begin, tl.where(known, tl.maximum((end + BLOCK_N - 1) // BLOCK_N - begin, 1), 0)


@triton.jit(do_not_specialize=["tiles", "num_seqs", "window", "target", "capacity"])
def plan(
    pieces_out, counters, query_starts, seq_lens, tiles, num_seqs, window, target, capacity,
    TILE_TOKENS: tl.constexpr, BLOCK_N: tl.constexpr, MIN_TILES: tl.constexpr, MOST: tl.constexpr,
    SHORT: tl.constexpr, LONG: tl.constexpr, HAS_WINDOW: tl.constexpr, KV_HEADS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Writes pieces [capacity, 8]: sequence (-1: none), first token, key tiles from and to, slot, first slot, number of
    pieces of its tile, tile. Slots are of tiles with several pieces. Zeroes the counters [tiles, K]. Grid: (1).

    LONG: tiles of sequences with more than SHORT tokens; else one tile for each of the others.
    """
    lane = tl.arange(0, BLOCK)
    work = lane * 0
    for base in range(0, tiles, BLOCK):
        for head in range(0, KV_HEADS):
            tl.store(counters + (base + lane) * KV_HEADS + head, lane * 0, mask=base + lane < tiles)
        _, _, _, count = tiles_of(
            base + lane, query_starts, seq_lens, num_seqs, window, TILE_TOKENS, BLOCK_N, SHORT, LONG, HAS_WINDOW
        )
        work += tl.where(base + lane < tiles, count, 0)
    most = tl.maximum((tl.sum(work, 0) + target - 1) // target, MIN_TILES)
    used = 0
    slots = 0
    for base in range(0, tiles, BLOCK):
        seq, first, begin, count = tiles_of(
            base + lane, query_starts, seq_lens, num_seqs, window, TILE_TOKENS, BLOCK_N, SHORT, LONG, HAS_WINDOW
        )
        count = tl.where(base + lane < tiles, count, 0)
        pieces = tl.minimum((count + most - 1) // most, MOST)
        pieces = tl.maximum(pieces, 1)
        share = tl.maximum((count + pieces - 1) // pieces, 1)  # the pieces of a tile are equal, but for the last
        pieces = (count + share - 1) // share
        place = used + tl.cumsum(pieces, 0) - pieces
        split = tl.where(pieces > 1, pieces, 0)
        slot = slots + tl.cumsum(split, 0) - split
        number = 0
        end = tl.max(pieces, 0)
        while number < end:
            mask = number < pieces
            into = pieces_out + (place + number) * FIELDS
            tl.store(into, seq, mask=mask)
            tl.store(into + 1, first, mask=mask)
            tl.store(into + 2, begin + number * share, mask=mask)
            tl.store(into + 3, begin + tl.minimum((number + 1) * share, count), mask=mask)
            tl.store(into + 4, slot + number, mask=mask)
            tl.store(into + 5, slot, mask=mask)
            tl.store(into + 6, pieces, mask=mask)
            tl.store(into + 7, base + lane, mask=mask)
            number += 1
        used += tl.sum(pieces, 0)
        slots += tl.sum(split, 0)
    for base in range(0, capacity, BLOCK):
        unused = (base + lane >= used) & (base + lane < capacity)
        tl.store(pieces_out + (base + lane) * FIELDS, lane * 0 - 1, mask=unused)

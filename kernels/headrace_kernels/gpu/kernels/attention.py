"""Paged attention as one kernel, with forms selected by its constants.

A program computes a tile of query rows: up to TILE_TOKENS tokens of one sequence times the GROUP query heads that share
a KV head, so that every key is read once for all of them. SPLIT = False: the program iterates over all keys of its
tile. SPLIT = True: the grid has a third axis over pieces of the keys, for short query tiles (decode). ORDERED = True:
keys are processed in chunks at absolute positions, merged in order, with the same operations in both forms (see
``fold``). Softmax is in base 2: scores are multiplied by log2(e).
"""

import triton
import triton.language as tl

from headrace_kernels.gpu.kernels.numbers import decode_e4m3


@triton.jit
def fold(mixed, peak, total, more, more_peak, more_total):
    """The merged softmax state of two sets of keys, [M, D], [M], [M] each: exact if one of them is empty."""
    top = tl.maximum(peak, more_peak)
    base = tl.where(top == float("-inf"), 0.0, top)
    keep = tl.exp2(peak - base)
    take = tl.exp2(more_peak - base)
    return mixed * keep[:, None] + more * take[:, None], top, total * keep + more_total * take


@triton.jit
def finish(mixed, peak, total, sinks, head, known, HAS_SINKS: tl.constexpr):
    """Output rows [M, D] of a complete softmax state; rows without keys are 0."""
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=known, other=0.0).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(peak, sink)
        keep = tl.exp2(peak - top)
        total = total * keep + tl.exp2(sink - top)
        mixed = mixed * keep[:, None]
    total = tl.where(total == 0.0, 1.0, total)
    return mixed / total[:, None]


@triton.jit
def key_range(seq_len, query_len, first, last, window, HAS_WINDOW: tl.constexpr):
    """Positions [low, end) that the tokens first..last of a sequence's queries attend to."""
    end = tl.maximum(seq_len - query_len + last + 1, 0)
    low = end * 0
    if HAS_WINDOW:
        low = tl.maximum(seq_len - query_len + first - window + 1, 0)
    return low, end


@triton.jit
def split_plan(
    low, end, splits, BLOCK_N: tl.constexpr, MIN_TILES: tl.constexpr, CHUNK: tl.constexpr, ORDERED: tl.constexpr
):
    """(first piece's first tile or chunk, tiles per piece, pieces): from lengths on the device alone."""
    if ORDERED:
        begin = low // CHUNK
        each = begin * 0 + CHUNK // BLOCK_N
        pieces = (end + CHUNK - 1) // CHUNK - begin
    else:
        begin = low // BLOCK_N
        tiles = (end + BLOCK_N - 1) // BLOCK_N - begin
        each = tl.maximum((tiles + splits - 1) // splits, MIN_TILES)
        pieces = (tiles + each - 1) // each
    return begin, each, tl.maximum(pieces, 1)


@triton.jit
def sequence_of(tile, query_starts, num_seqs, TILE_TOKENS: tl.constexpr):
    """The sequence of a query tile: sequence s begins at tile ``query_starts[s] // TILE_TOKENS + s``."""
    low = 0
    high = num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_starts + middle) // TILE_TOKENS + middle <= tile:
            low = middle + 1
        else:
            high = middle
    return low - 1


@triton.jit
def load_tile(start, offset, live, d, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr):
    """Rows [N, D] at ``start + offset``; rows that are not live, and the padding of D, are 0 and not read."""
    if HEAD_DIM == D_PAD:
        return tl.load(start + offset[:, None] + d[None, :], mask=live[:, None], other=0)
    return tl.load(start + offset[:, None] + d[None, :], mask=live[:, None] & (d < HEAD_DIM)[None, :], other=0)


@triton.jit
def widen(x, QUANT: tl.constexpr, COMPUTE: tl.constexpr):
    """Pool entries as operands of a product; e4m3 (QUANT = 2) is loaded as bytes and returned as value / 256."""
    if QUANT == 2:
        return decode_e4m3(x).to(COMPUTE)
    if QUANT == 1:
        return x.to(tl.float32).to(COMPUTE)
    if x.dtype == COMPUTE:
        return x
    return x.to(tl.float32).to(COMPUTE)


@triton.jit
def attend_tiles(
    q, position, first_tile, last_tile, low, end, table, keys, values, key_scales, value_scales, scale, softcap, window,
    block_stride, slot_stride, scale_block_stride,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, QUANT: tl.constexpr, COMPUTE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Online softmax of query rows [M, D] over key tiles [first_tile, last_tile) -> (mixed [M, D], peak, total)."""
    d = tl.arange(0, D_PAD)
    lane = tl.arange(0, BLOCK_N)
    mixed = tl.full([BLOCK_M, D_PAD], 0.0, tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    for tile in range(first_tile, last_tile):
        n = tile * BLOCK_N + lane
        live = (n >= low) & (n < end)  # the rest may be stale table entries, or NaN
        block = tl.load(table + n // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
        offset = block * block_stride + (n % BLOCK_SIZE) * slot_stride
        key = widen(load_tile(keys, offset, live, d, HEAD_DIM, D_PAD), QUANT, COMPUTE)
        scores = tl.dot(q, tl.trans(key), input_precision=PRECISION)
        if QUANT:
            place = block * scale_block_stride + n % BLOCK_SIZE
            key_scale = tl.load(key_scales + place, mask=live, other=0.0)
            if QUANT == 2:
                key_scale = key_scale * 256.0
            scores = scores * key_scale[None, :]
        scores = scores * scale
        if HAS_SOFTCAP:
            scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * 2.8853900817779268) + 1.0))
        seen = live[None, :] & (n[None, :] <= position[:, None])
        if HAS_WINDOW:
            seen = seen & (n[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(peak, tl.max(scores, 1))
        base = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp2(scores - base[:, None])
        shrink = tl.exp2(peak - base)
        total = total * shrink + tl.sum(weights, 1)
        mixed = mixed * shrink[:, None]
        peak = top
        value = widen(load_tile(values, offset, live, d, HEAD_DIM, D_PAD), QUANT, COMPUTE)
        if QUANT:
            value_scale = tl.load(value_scales + place, mask=live, other=0.0)
            if QUANT == 2:
                value_scale = value_scale * 256.0
            weights = weights * value_scale[None, :]
        mixed = tl.dot(weights.to(COMPUTE), value, mixed, input_precision=PRECISION)
    return mixed, peak, total


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "table_stride", "splits", "window"])
def attend(
    out, part_mixed, part_peak, part_total, query, keys, values, key_scales, value_scales, sinks,
    query_starts, seq_lens, tables, scale, softcap, window, num_seqs, num_tokens, splits,
    query_token, query_head, table_stride, block_stride, head_stride, slot_stride, scale_block_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, MIN_TILES: tl.constexpr,
    CHUNK: tl.constexpr, SHORT: tl.constexpr, SPLIT: tl.constexpr, ORDERED: tl.constexpr, ZERO_TAIL: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, HAS_SINKS: tl.constexpr, QUANT: tl.constexpr,
    COMPUTE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (sequences if SPLIT else query tiles, KV heads, pieces if SPLIT else 1)."""
    kv_head = tl.program_id(1)
    piece = tl.program_id(2)
    row = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_PAD)
    head = kv_head * GROUP + row % GROUP
    inside = (d < HEAD_DIM)[None, :]

    if ZERO_TAIL:  # tokens of the padding: the step is shorter than its tensors
        token = tl.program_id(0) * TILE_TOKENS + row // GROUP
        tail = (token >= tl.load(query_starts + num_seqs)) & (token < num_tokens)
        tail = tail & (row + piece * BLOCK_M < TILE_TOKENS * GROUP)  # the first piece does it
        place = out + (token.to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + d[None, :]
        tl.store(place, tl.full([BLOCK_M, D_PAD], 0.0, out.dtype.element_ty), mask=tail[:, None] & inside)

    if SPLIT:
        seq = tl.program_id(0)
        first = 0
    else:
        tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest contexts first
        seq = sequence_of(tile, query_starts, num_seqs, TILE_TOKENS)
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
    begin, each, pieces = split_plan(low, end, splits, BLOCK_N, MIN_TILES, CHUNK, ORDERED)
    if SPLIT:
        if piece >= pieces:
            return

    token = first + row // GROUP
    known = (row < TILE_TOKENS * GROUP) & (token < query_len)
    position = seq_len - query_len + token
    place = (start + token).to(tl.int64) * query_token + head * query_head
    q = tl.load(query + place[:, None] + d[None, :], mask=known[:, None] & inside, other=0.0)
    q = widen(q, 0, COMPUTE)
    table = tables + seq.to(tl.int64) * table_stride
    keys += kv_head.to(tl.int64) * head_stride
    values += kv_head.to(tl.int64) * head_stride
    if QUANT:
        key_scales += kv_head * BLOCK_SIZE
        value_scales += kv_head * BLOCK_SIZE
    end_tile = (end + BLOCK_N - 1) // BLOCK_N
    into = out + ((start + token).to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    part = ((seq.to(tl.int64) * tl.num_programs(1) + kv_head) * (TILE_TOKENS * GROUP) + row) * splits

    if ORDERED:
        mixed = tl.full([BLOCK_M, D_PAD], 0.0, tl.float32)
        peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.full([BLOCK_M], 0.0, tl.float32)
        step = tl.num_programs(2) if SPLIT else 1
        for chunk in range(piece, pieces, step):
            more, more_peak, more_total = attend_tiles(
                q, position, tl.maximum((begin + chunk) * each, low // BLOCK_N),
                tl.minimum((begin + chunk + 1) * each, end_tile), low, end, table, keys, values, key_scales,
                value_scales, scale, softcap, window, block_stride, slot_stride, scale_block_stride,
                HEAD_DIM, D_PAD, BLOCK_SIZE, BLOCK_M, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, QUANT, COMPUTE, PRECISION,
            )  # fmt: skip
            mixed, peak, total = fold(mixed, peak, total, more, more_peak, more_total)
            if SPLIT:
                if pieces > 1:
                    at = part + chunk
                    tl.store(part_mixed + at[:, None] * HEAD_DIM + d[None, :], more, mask=known[:, None] & inside)
                    tl.store(part_peak + at, more_peak, mask=known)
                    tl.store(part_total + at, more_total, mask=known)
        if SPLIT:
            if pieces > 1:
                return
    else:
        first_tile = begin
        if SPLIT:
            first_tile = begin + piece * each
            end_tile = tl.minimum(first_tile + each, end_tile)
        mixed, peak, total = attend_tiles(
            q, position, first_tile, end_tile, low, end, table, keys, values, key_scales, value_scales, scale, softcap,
            window, block_stride, slot_stride, scale_block_stride,
            HEAD_DIM, D_PAD, BLOCK_SIZE, BLOCK_M, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, QUANT, COMPUTE, PRECISION,
        )  # fmt: skip
        if SPLIT:
            if pieces > 1:
                at = part + piece
                tl.store(part_mixed + at[:, None] * HEAD_DIM + d[None, :], mixed, mask=known[:, None] & inside)
                tl.store(part_peak + at, peak, mask=known)
                tl.store(part_total + at, total, mask=known)
                return
    done = finish(mixed, peak, total, sinks, head, known, HAS_SINKS)
    tl.store(into, done.to(out.dtype.element_ty), mask=known[:, None] & inside)

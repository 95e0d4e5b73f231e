"""Paged attention: what the kernels for steps (`attend.py`) and for fixed bits (`ordered.py`) have in common.

A program computes a tile of query rows: up to TILE_TOKENS tokens of one sequence times the GROUP query heads that share
a KV head, so that every key is read once for all of them. Softmax is in base 2: scores are multiplied by log2(e).
"""

import triton
import triton.language as tl

from headrace_kernels.gpu.kernels.numbers import decode_e4m3, e4m3_to_float16, int8_to_float16


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
def zero_padding(
    out, token, head, first, query_starts, num_seqs, num_tokens,
    HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, TILE_TOKENS: tl.constexpr, BLOCK_M: tl.constexpr,
    D_PAD: tl.constexpr,
):  # fmt: skip
    """Zeroes the rows of `token` [M] that belong to no sequence: the step is shorter than its tensors.

    `first`: of the rows of a tile that this program has.
    """
    row = tl.arange(0, BLOCK_M)
    d = tl.arange(0, D_PAD)
    tail = (token >= tl.load(query_starts + num_seqs)) & (token < num_tokens) & (first + row < TILE_TOKENS * GROUP)
    place = out + (token.to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + d[None, :]
    zeros = tl.full([BLOCK_M, D_PAD], 0.0, out.dtype.element_ty)
    tl.store(place, zeros, mask=tail[:, None] & (d < HEAD_DIM)[None, :])


@triton.jit
def load_tile(start, offset, live, d, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, MASKED: tl.constexpr):
    """Rows [N, D] at ``start + offset``; rows that are not live, and the padding of D, are 0 and not read."""
    if HEAD_DIM != D_PAD:
        return tl.load(start + offset[:, None] + d[None, :], mask=live[:, None] & (d < HEAD_DIM)[None, :], other=0)
    if MASKED:
        return tl.load(start + offset[:, None] + d[None, :], mask=live[:, None], other=0)
    return tl.load(start + offset[:, None] + d[None, :])


@triton.jit
def load_scales(places, live, MASKED: tl.constexpr):
    """Scales [N]; those of keys that are not live are 0 and not read."""
    if MASKED:
        return tl.load(places, mask=live, other=0.0)
    return tl.load(places)


@triton.jit
def widen(x, QUANT: tl.constexpr, COMPUTE: tl.constexpr, COLUMNS: tl.constexpr = False):
    """Pool entries as operands of a product; e4m3 is loaded as bytes. All numbers of 8 bits are exact in float16.

    QUANT: 1 int8, 2 e4m3; 3 and 4 the same by instructions of devices. COLUMNS: the product reads x by columns.
    """
    if QUANT == 4:
        return int8_to_float16(x)
    if QUANT == 3:
        return e4m3_to_float16(x) if COLUMNS else x.to(tl.float8e4nv, bitcast=True).to(tl.float16)
    if QUANT == 2:
        return decode_e4m3(x).to(COMPUTE)
    if QUANT == 1:
        return x.to(COMPUTE)
    if x.dtype == COMPUTE:
        return x
    return x.to(tl.float32).to(COMPUTE)


@triton.jit
def load_query(
    query, token, head, known, token_stride, head_stride, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr,
    COMPUTE: tl.constexpr,
):  # fmt: skip
    """Query rows [M, D] of tokens [M] and heads [M] as operands of a product; rows that are not known are 0."""
    d = tl.arange(0, D_PAD)
    place = token.to(tl.int64) * token_stride + head * head_stride
    mask = known[:, None] & (d < HEAD_DIM)[None, :]
    return widen(tl.load(query + place[:, None] + d[None, :], mask=mask, other=0.0), 0, COMPUTE)


@triton.jit
def attend_tile(
    mixed, peak, total, tile, q, q_rest, position, low, end, table, keys, values, key_scales, value_scales, scale,
    softcap, window, block_stride, slot_stride, value_block, value_slot, scale_block_stride,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, SHARED: tl.constexpr,
    QUANT: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The softmax state after one more tile of keys. MASKED: some of them may not be seen by all rows."""
    d = tl.arange(0, D_PAD)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    if MASKED:
        live = (n >= low) & (n < end)  # the rest may be stale table entries, or NaN
        block = tl.load(table + n // BLOCK_SIZE, mask=live, other=0).to(tl.int64)
    else:
        live = n >= 0
        block = tl.load(table + n // BLOCK_SIZE).to(tl.int64)
    offset = block * block_stride + (n % BLOCK_SIZE) * slot_stride
    key = widen(load_tile(keys, offset, live, d, HEAD_DIM, D_PAD, MASKED), QUANT, COMPUTE)
    scores = tl.dot(q, tl.trans(key), input_precision=PRECISION)
    if REST:
        r = tl.arange(0, REST_PAD)
        rest = widen(load_tile(keys + HEAD_DIM, offset, live, r, REST, REST_PAD, MASKED), 0, COMPUTE)
        scores = tl.dot(q_rest, tl.trans(rest), scores, input_precision=PRECISION)
    if QUANT:
        place = block * scale_block_stride + n % BLOCK_SIZE
        scores = scores * (load_scales(key_scales + place, live, MASKED) * scale)[None, :]
    else:
        scores = scores * scale
    if HAS_SOFTCAP:
        scores = softcap * (1.0 - 2.0 / (tl.exp2(scores * 2.8853900817779268) + 1.0))
    if MASKED:
        seen = live[None, :] & (n[None, :] <= position[:, None])
        if HAS_WINDOW:
            seen = seen & (n[None, :] > position[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
    top = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(top == float("-inf"), 0.0, top) if MASKED else top
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(peak - base)
    total = total * shrink + tl.sum(weights, 1)
    mixed = mixed * shrink[:, None]
    value = key
    if not SHARED:
        place_of_value = block * value_block + (n % BLOCK_SIZE) * value_slot
        value = widen(load_tile(values, place_of_value, live, d, HEAD_DIM, D_PAD, MASKED), QUANT, COMPUTE, True)
    if QUANT:
        weights = weights * (load_scales(value_scales + place, live, MASKED) * 256.0)[None, :]
    return tl.dot(weights.to(COMPUTE), value, mixed, input_precision=PRECISION), top, total


@triton.jit
def attend_tiles(
    q, q_rest, position, oldest, newest, first_tile, last_tile, low, end, table, keys, values, key_scales, value_scales,
    scale, softcap, window, block_stride, slot_stride, value_block, value_slot, scale_block_stride,
    HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr, REST: tl.constexpr, REST_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    SHARED: tl.constexpr, QUANT: tl.constexpr, COMPUTE: tl.constexpr, PRECISION: tl.constexpr, PARTED: tl.constexpr,
):  # fmt: skip
    """Online softmax of query rows [M, D] over key tiles [first_tile, last_tile) -> (mixed [M, D], peak, total).

    Keys, and with them queries (q_rest [M, R]), have REST more numbers than values. SHARED: the others are the value.
    position [M] of the queries, oldest and newest: the first and the last one. PARTED: tiles that all rows see whole
    are computed without a mask.
    """
    mixed = tl.full([BLOCK_M, D_PAD], 0.0, tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.full([BLOCK_M], 0.0, tl.float32)
    middle = first_tile
    if PARTED:
        whole = tl.minimum(end, oldest + 1) // BLOCK_N
        if HAS_WINDOW:
            middle = (tl.maximum(newest - window + 1, 0) + BLOCK_N - 1) // BLOCK_N
            middle = tl.minimum(tl.maximum(middle, first_tile), last_tile)
            for tile in range(first_tile, middle):
                mixed, peak, total = attend_tile(
                    mixed, peak, total, tile, q, q_rest, position, low, end, table, keys, values, key_scales,
                    value_scales, scale, softcap, window, block_stride, slot_stride, value_block, value_slot,
                    scale_block_stride, HEAD_DIM, D_PAD, REST, REST_PAD, BLOCK_SIZE, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP,
                    SHARED, QUANT, COMPUTE, PRECISION, True,
                )  # fmt: skip
        whole = tl.minimum(tl.maximum(whole, middle), last_tile)
        for tile in range(middle, whole):
            mixed, peak, total = attend_tile(
                mixed, peak, total, tile, q, q_rest, position, low, end, table, keys, values, key_scales, value_scales,
                scale, softcap, window, block_stride, slot_stride, value_block, value_slot, scale_block_stride,
                HEAD_DIM, D_PAD, REST, REST_PAD, BLOCK_SIZE, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, SHARED, QUANT, COMPUTE,
                PRECISION, False,
            )  # fmt: skip
        middle = whole
    for tile in range(middle, last_tile):
        mixed, peak, total = attend_tile(
            mixed, peak, total, tile, q, q_rest, position, low, end, table, keys, values, key_scales, value_scales,
            scale, softcap, window, block_stride, slot_stride, value_block, value_slot, scale_block_stride,
            HEAD_DIM, D_PAD, REST, REST_PAD, BLOCK_SIZE, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, SHARED, QUANT, COMPUTE,
            PRECISION, True,
        )  # fmt: skip
    if QUANT:
        mixed = mixed * 0.00390625  # the weights were multiplied by 256, to be normal numbers in float16
    return mixed, peak, total

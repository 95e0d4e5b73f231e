"""Sampling as ``headrace_kernels.reference.draw`` and ``.noise`` define it.

    draw_pieces, a program per 8,192 logits ─▶ best of a piece, largest of each sub-block of 512 ─▶ decide, one per row

A token that is the best of all logits is also the best of those that top-k, top-p and min-p keep, if it is one of them.
So `decide` draws again only where it is not, among the larger logits. It needs no sort: a k-th largest logit is found
by counting, in the sub-blocks whose largest logit is large enough.

To be launched with ``enable_fp_fusion=False``: every operation must be rounded separately.
"""

import triton
import triton.language as tl

LARGEST_NOISE = tl.constexpr(23.0)  # the definition's maximum is 22.9


@triton.jit
def shift_right(x, BITS: tl.constexpr):
    return (x >> BITS) & ((1 << (64 - BITS)) - 1)


@triton.jit
def finalize(x):
    """SplitMix64's output function on int64, modulo 2**64; the factors are 0xBF58476D1CE4E5B9, 0x94D049BB133111EB."""
    x = (x ^ shift_right(x, 30)) * -4658895280553007687
    x = (x ^ shift_right(x, 27)) * -7723592293110705685
    return x ^ shift_right(x, 31)


@triton.jit
def split(x):
    """(f, e) with x = (1 + f) * 2**e and 1 + f in [0.707, 1.414), for positive normal x."""
    bits = x.to(tl.int32, bitcast=True)
    mantissa = ((bits & 0x007FFFFF) | 0x3F000000).to(tl.float32, bitcast=True)
    exponent = (bits >> 23) - 126
    low = mantissa < 0.70703125
    f = tl.where(low, mantissa * 2.0, mantissa) - 1.0
    return f, tl.where(low, exponent - 1, exponent).to(tl.float32)


@triton.jit
def logarithm(f, exponent):
    s = tl.div_rn(f, f + 2.0)
    z = s * s
    series = z * (1.0 / 9.0)
    series = z * (series + (1.0 / 7.0))
    series = z * (series + (1.0 / 5.0))
    series = z * (series + (1.0 / 3.0))
    twice = s + s
    return exponent * 0.6931471805599453 + (twice + twice * series)


@triton.jit
def hash_of(key, index):
    """32 random bits of an int64 key at int64 indices."""
    return shift_right(finalize(key + (index + 1) * -7046029254386353131), 32).to(tl.uint32)  # 0x9E3779B97F4A7C15


@triton.jit
def reach_of(noise):
    """The largest 32 random bits that may have so much noise."""
    return tl.exp2(tl.maximum(noise, 0.0) * -1.44269504) * 4294967296.0


@triton.jit
def noise_of(hashed):
    """The noise of 32 random bits."""
    x = (hashed.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    x = tl.minimum(x, 0.999999940395355224609375)
    near = x < 0.25
    f, exponent = split(1.0 - x)
    exponential = -logarithm(tl.where(near, -x, f), tl.where(near, 0.0, exponent))
    f, exponent = split(exponential)
    return -logarithm(f, exponent)


@triton.jit
def weight_of(power):
    """floor(2**40 * 2**power) as int64, of powers of at most 0."""
    power = tl.maximum(power, -64.0)
    shifted = power + 12582912.0  # steps of 1: rounds to the nearest, ties to even
    rest = power - (shifted - 12582912.0)
    # The polynomial times 2**40: the whole part of the power is added to its exponent.
    series = 0.009570100344717503 * 2**40 * rest + 0.05591785907745361 * 2**40
    series = series * rest + 0.240247443318367 * 2**40
    series = series * rest + 0.6931217908859253 * 2**40
    series = series * rest + 0.9999992847442627 * 2**40
    whole = shifted.to(tl.int32, bitcast=True) << 23  # the bits of 1.5 * 2**23 fall out
    return (series.to(tl.int32, bitcast=True) + whole).to(tl.float32, bitcast=True).to(tl.int64)


@triton.jit
def order_of(x, LOW_BITS: tl.constexpr):
    """Integers in the order of float32 numbers whose lowest bits are zero, without gaps."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> LOW_BITS


@triton.jit
def number_at(order, LOW_BITS: tl.constexpr):
    """The number with this place in the order."""
    bits = (order << LOW_BITS) | ((order >> 31) & ((1 << LOW_BITS) - 1))
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def draw_pieces(
    best, best_index, sub_peaks, logits, rows, positions, numbers, integers, stride,
    V: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr, SUB: tl.constexpr,
):  # fmt: skip
    """The best of each piece of a row's logits / temperature + noise, the first of equals. Grid: (rows, V / PIECE)."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    user = tl.load(rows + row)
    temperature = tl.load(numbers + user * 3)
    key = finalize((tl.load(integers + user * 2) ^ tl.load(positions + row)) + -7046029254386353131)
    lane = tl.arange(0, BLOCK)
    part = tl.arange(0, BLOCK // SUB)
    top = tl.full([], float("-inf"), tl.float32)
    top_index = piece * PIECE
    for base in range(piece * PIECE, piece * PIECE + PIECE, BLOCK):
        index = base + lane
        x = tl.load(logits + row * stride + index, mask=index < V, other=float("-inf")).to(tl.float32)
        x = tl.where(x == x, x, float("inf"))
        peaks = tl.max(tl.reshape(x, (BLOCK // SUB, SUB)), 1)
        sub = base // SUB + part
        tl.store(sub_peaks + row * ((V + SUB - 1) // SUB) + sub, peaks, mask=sub * SUB < V)
        peak = tl.max(peaks, 0)
        if temperature > 0.0:
            # The noise that a logit of this block needs at least to be the best, less a margin for rounding.
            short = top - tl.div_rn(peak, temperature) - 0.01 - tl.abs(top) * 1e-6
            if not short > LARGEST_NOISE:
                hashed = hash_of(key, index.to(tl.int64))
                # A noise above d needs a hash below 2**32 * exp(-d): logarithms are rarely computed.
                if tl.min(hashed, 0).to(tl.float32) <= reach_of(short):
                    needed = short + (peak - x) * tl.div_rn(1.0, temperature) * 0.999999
                    if tl.max((hashed.to(tl.float32) <= reach_of(needed)).to(tl.int32), 0) > 0:
                        x = tl.div_rn(x, temperature) + noise_of(hashed)
                        peak, where = tl.max(x, 0, return_indices=True)
                        if peak > top:
                            top = peak
                            top_index = base + where
        elif peak > top:
            _, where = tl.max(x, 0, return_indices=True)
            top = peak
            top_index = base + where
    place = row * tl.num_programs(1) + piece
    tl.store(best + place, top)
    tl.store(best_index + place, top_index)


@triton.jit
def tile_at(logits, listed, at, count, V: tl.constexpr, SUB: tl.constexpr, TILE: tl.constexpr):
    """(logits, indices) [TILE, SUB] of the sub-blocks in a list from a place on; -inf beyond its end."""
    place = at + tl.arange(0, TILE)
    sub = tl.load(listed + place, mask=place < count, other=0)
    index = sub[:, None] * SUB + tl.arange(0, SUB)[None, :]
    inside = (place < count)[:, None] & (index < V)
    return tl.load(logits + index, mask=inside, other=float("-inf")).to(tl.float32), index


@triton.jit
def list_of(listed, chosen, SUBS: tl.constexpr, PAD: tl.constexpr):
    """Writes the numbers of the chosen sub-blocks, in order, and returns how many they are."""
    chosen = chosen & (tl.arange(0, PAD) < SUBS)
    place = tl.cumsum(chosen.to(tl.int32), 0)
    tl.debug_barrier()  # what was listed before has been read
    tl.store(listed + place - 1, tl.arange(0, PAD), mask=chosen)
    tl.debug_barrier()
    return tl.max(place, 0)


@triton.jit
def kth_largest(
    logits, listed, peaks, peak, k, V: tl.constexpr, SUB: tl.constexpr, SUBS: tl.constexpr, PAD: tl.constexpr,
    TILE: tl.constexpr, LOW_BITS: tl.constexpr,
):  # fmt: skip
    """The k-th largest logit of a row. The k-th largest of the peaks of sub-blocks bounds it from below."""
    low = order_of(tl.full([], float("-inf"), tl.float32), LOW_BITS).to(tl.int64)
    high = order_of(peak, LOW_BITS).to(tl.int64)
    if k <= SUBS:
        end = high
        while low < end:
            middle = low + (end - low + 1) // 2
            if tl.sum((peaks >= number_at(middle.to(tl.int32), LOW_BITS)).to(tl.int32), 0) >= k:
                low = middle
            else:
                end = middle - 1
    count = list_of(listed, peaks >= number_at(low.to(tl.int32), LOW_BITS), SUBS, PAD)
    while low < high:
        middle = low + (high - low + 1) // 2
        number = number_at(middle.to(tl.int32), LOW_BITS)
        larger = tl.zeros([TILE, SUB], tl.int32)
        for at in range(0, count, TILE):
            x, _ = tile_at(logits, listed, at, count, V, SUB, TILE)
            larger += (x >= number).to(tl.int32)
        if tl.sum(larger) >= k:
            low = middle
        else:
            high = middle - 1
    return number_at(low.to(tl.int32), LOW_BITS)


@triton.jit
def is_within(
    logits, listed, count, value, peak, least, top_p, scale, V: tl.constexpr, SUB: tl.constexpr, TILE: tl.constexpr
):
    """Whether the mass above this logit is less than top_p of that from `least` on."""
    total = tl.zeros([TILE, SUB], tl.int64)
    above = tl.zeros([TILE, SUB], tl.int64)
    for at in range(0, count, TILE):
        x, _ = tile_at(logits, listed, at, count, V, SUB, TILE)
        weight = tl.where(x >= least, weight_of((x - peak) * scale), 0)
        total += weight
        above += tl.where(x > value, weight, 0)
    over = tl.sum(above)
    return (over == 0) | (over.to(tl.float64) < top_p.to(tl.float64) * tl.sum(total).to(tl.float64))


@triton.jit
def draw_above(
    logits, listed, count, value, least, temperature, key, V: tl.constexpr, SUB: tl.constexpr, TILE: tl.constexpr
):
    """The index of the best of the logits above `value` and from `least` on, the first of equals."""
    top = tl.full([], float("-inf"), tl.float32)
    top_index = tl.full([], 0, tl.int32)
    for at in range(0, count, TILE):
        x, index = tile_at(logits, listed, at, count, V, SUB, TILE)
        allowed = (x > value) & (x >= least)
        if tl.max(tl.where(allowed, 1, 0)) > 0:
            noisy = tl.div_rn(x, temperature) + noise_of(hash_of(key, index.to(tl.int64)))
            noisy = tl.where(allowed, noisy, float("-inf"))
            peak = tl.max(noisy)
            if peak > top:
                top = peak
                # Not the index that `max` can return: Triton reorders what it reshapes for a reduction, but no indices.
                top_index = tl.min(tl.where(noisy == peak, index, V))
    return top_index


@triton.jit
def decide(
    tokens, row_peaks, best, best_index, sub_peaks, listed, logits, rows, positions, numbers, integers, stride,
    V: tl.constexpr, PIECES: tl.constexpr, PIECES_PAD: tl.constexpr, SUB: tl.constexpr, SUBS: tl.constexpr,
    SUBS_PAD: tl.constexpr, TILE: tl.constexpr, LOW_BITS: tl.constexpr,
):  # fmt: skip
    """The token of a row and its largest logit. Grid: (rows)."""
    row = tl.program_id(0).to(tl.int64)
    user = tl.load(rows + row)
    temperature = tl.load(numbers + user * 3)
    top_p = tl.load(numbers + user * 3 + 1)
    log_min_p = tl.load(numbers + user * 3 + 2)
    top_k = tl.load(integers + user * 2 + 1)
    piece = tl.arange(0, PIECES_PAD)
    x = tl.load(best + row * PIECES + piece, mask=piece < PIECES, other=float("-inf"))
    _, where = tl.max(x, 0, return_indices=True)
    token = tl.load(best_index + row * PIECES + where)
    sub = tl.arange(0, SUBS_PAD)
    peaks = tl.load(sub_peaks + row * SUBS + sub, mask=sub < SUBS, other=float("-inf"))
    peak = tl.max(peaks, 0)
    tl.store(row_peaks + row, peak)
    top_k = tl.where(top_k < V, top_k, 0)
    cuts = (top_k > 0) | (top_p < 1.0) | (log_min_p > float("-inf"))
    if cuts & (temperature > 0.0) & (tl.abs(peak) < float("inf")):
        logits += row * stride
        listed += row * SUBS
        key = finalize((tl.load(integers + user * 2) ^ tl.load(positions + row)) + -7046029254386353131)
        least = tl.where(log_min_p > float("-inf"), peak + temperature * log_min_p, float("-inf"))
        if top_k > 0:
            kth = kth_largest(logits, listed, peaks, peak, top_k, V, SUB, SUBS, SUBS_PAD, TILE, LOW_BITS)
            least = tl.maximum(least, kth)
        scale = tl.div_rn(tl.full([], 1.4426950408889634, tl.float32), temperature)
        lightest = tl.where(top_p < 1.0, -42.0, float("-inf"))  # smaller powers of two have no mass
        useful = (peaks >= least) & ((peaks - peak) * scale > lightest)
        count = list_of(listed, useful, SUBS, SUBS_PAD)
        value = tl.load(logits + token).to(tl.float32)
        done = value >= least
        if done & (top_p < 1.0):
            done = is_within(logits, listed, count, value, peak, least, top_p, scale, V, SUB, TILE)
        while (done | (value >= peak)) == 0:
            token = draw_above(logits, listed, count, value, least, temperature, key, V, SUB, TILE)
            value = tl.load(logits + token).to(tl.float32)
            done = top_p >= 1.0
            if top_p < 1.0:
                done = is_within(logits, listed, count, value, peak, least, top_p, scale, V, SUB, TILE)
    tl.store(tokens + row, token.to(tl.int64))

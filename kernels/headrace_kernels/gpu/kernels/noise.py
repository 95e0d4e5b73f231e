"""Gumbel noise as ``headrace_kernels.reference.noise`` defines it.

To be launched with ``enable_fp_fusion=False``: every operation must be rounded separately.
"""

import triton
import triton.language as tl

_LARGEST_NOISE = tl.constexpr(23.0)  # the definition's maximum is 22.9


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
def noise_of(key, index):
    """Noise of an int64 key at int64 indices."""
    hashed = finalize(key + (index + 1) * -7046029254386353131)  # 0x9E3779B97F4A7C15
    x = (shift_right(hashed, 32).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    x = tl.minimum(x, 0.999999940395355224609375)
    near = x < 0.25
    f, exponent = split(1.0 - x)
    exponential = -logarithm(tl.where(near, -x, f), tl.where(near, 0.0, exponent))
    f, exponent = split(exponential)
    return -logarithm(f, exponent)


@triton.jit(do_not_specialize=["count"])
def gumbel_noise_at(out, keys, ids, count, each, BLOCK: tl.constexpr):
    """Noise at ids [rows, each] of ``count`` entries in all. Grid: (count / BLOCK)."""
    entry = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = entry < count
    index = tl.load(ids + entry, mask=mask, other=0)
    key = tl.load(keys + entry // each, mask=mask, other=0)
    tl.store(out + entry, noise_of(key, index), mask=mask)


@triton.jit
def best_of_pieces(best, best_index, scores, keys, stride, V: tl.constexpr, PIECE: tl.constexpr, BLOCK: tl.constexpr):
    """The best of each piece of a row's scores + noise, the first of equals. Grid: (rows, V / PIECE)."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.program_id(1)
    key = tl.load(keys + row)
    lane = tl.arange(0, BLOCK)
    top = tl.full([], float("-inf"), tl.float32)
    top_index = piece * PIECE
    for base in range(piece * PIECE, piece * PIECE + PIECE, BLOCK):
        index = base + lane
        x = tl.load(scores + row * stride + index, mask=index < V, other=float("-inf"))
        if tl.max(x, 0) + _LARGEST_NOISE > top:  # else no noise could make one of these the maximum
            x = x + noise_of(key, index.to(tl.int64))
            peak, where = tl.max(x, 0, return_indices=True)
            if peak > top:
                top = peak
                top_index = base + where
    place = row * tl.num_programs(1) + piece
    tl.store(best + place, top)
    tl.store(best_index + place, top_index)


@triton.jit
def best_of_row(out, best, best_index, PIECES: tl.constexpr, PAD: tl.constexpr):
    """The best of a row's pieces, the first of equals. Grid: (rows)."""
    row = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PAD)
    x = tl.load(best + row * PIECES + piece, mask=piece < PIECES, other=float("-inf"))
    _, where = tl.max(x, 0, return_indices=True)
    tl.store(out + row, tl.load(best_index + row * PIECES + where).to(tl.int64))

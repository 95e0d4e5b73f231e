"""Layers with recurrent state: token by token, so that the bits of a row depend neither on its batch nor on its pieces.

A program has a part of the channels of one sequence: it begins at the first of the sequence's pieces in the step, goes
through those that follow, which read what it wrote, and keeps the state in registers. Grids depend on shapes alone.
"""

import triton
import triton.language as tl


@triton.jit
def follows(piece, pieces, reads, writes):
    """Whether a piece reads what the one before it writes: the program of that one computes it."""
    before = tl.load(writes + tl.maximum(piece - 1, 0))
    read = tl.load(reads + tl.minimum(piece, pieces - 1))
    return (piece > 0) & (piece < pieces) & (before != 0) & (before == read)


@triton.jit
def softplus(x):
    """The logarithm of 1 + exp(x), also where that is close to 0; above 20 it is x."""
    small = tl.exp(tl.minimum(x, 20.0))
    total = 1.0 + small
    rounded = total - 1.0
    near = tl.where(rounded == 0.0, small, tl.log(total) * (small / tl.where(rounded == 0.0, 1.0, rounded)))
    return tl.where(x > 20.0, x, near)


@triton.jit
def silu(x):
    return x / (1.0 + tl.exp(-x))


@triton.jit(do_not_specialize=["pieces", "x_token"])
def causal_conv(
    out, x, weight, bias, pool, starts, reads, writes, pieces, x_token, channels, weight_row, weight_tap,
    slot_stride, row_stride,
    WIDTH: tl.constexpr, KEPT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, HAS_BIAS: tl.constexpr,
    SILU: tl.constexpr,
):  # fmt: skip
    """x and out [T, C], weight [C, WIDTH], pool [N, WIDTH - 1, C]. Grid: (pieces, blocks of channels)."""
    piece = tl.program_id(0)
    first = tl.load(starts + piece)
    stop = tl.load(starts + piece + 1)
    if (first == stop) | follows(piece, pieces, reads, writes):
        return
    last = piece
    while follows(last + 1, pieces, reads, writes):
        last += 1
    end = tl.load(starts + last + 1)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = c < channels
    before = pool + tl.load(reads + piece).to(tl.int64) * slot_stride + c
    row = tl.arange(0, BLOCK_T)
    start_bias = tl.full([BLOCK_C], 0.0, tl.float32)
    if HAS_BIAS:
        start_bias = tl.load(bias + c, mask=inside, other=0.0).to(tl.float32)
    for base in range(first, end, BLOCK_T):
        token = base + row
        total = tl.full([BLOCK_T, BLOCK_C], 0.0, tl.float32) + start_bias[None, :]
        for tap in tl.static_range(WIDTH):
            source = token + (tap - (WIDTH - 1))
            new = (source >= first) & (source < end)
            old = (source < first) & (token < end)
            value = tl.load(
                x + source.to(tl.int64)[:, None] * x_token + c[None, :], mask=new[:, None] & inside[None, :], other=0.0
            ).to(tl.float32)
            value += tl.load(
                before[None, :] + (WIDTH - 1 + source - first)[:, None] * row_stride,
                mask=old[:, None] & inside[None, :], other=0.0,
            ).to(tl.float32)  # fmt: skip
            factor = tl.load(weight + c * weight_row + tap * weight_tap, mask=inside, other=0.0).to(tl.float32)
            total += value * factor[None, :]
        if SILU:
            total = silu(total)
        place = out + token.to(tl.int64)[:, None] * channels + c[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=(token < end)[:, None] & inside[None, :])
    k = tl.arange(0, KEPT)
    for one in range(piece, last + 1):
        tl.debug_barrier()  # the piece before has stored what this one reads
        first = tl.load(starts + one)
        stop = tl.load(starts + one + 1)
        into = tl.load(writes + one).to(tl.int64)
        before = pool + tl.load(reads + one).to(tl.int64) * slot_stride + c
        source = stop - (WIDTH - 1) + k
        kept = (k < WIDTH - 1) & (into + k * 0 != 0)
        new = kept & (source >= first)
        old = kept & (source < first)
        value = tl.load(
            x + source.to(tl.int64)[:, None] * x_token + c[None, :], mask=new[:, None] & inside[None, :], other=0.0
        )
        held = tl.load(
            before[None, :] + (WIDTH - 1 + source - first)[:, None] * row_stride,
            mask=old[:, None] & inside[None, :], other=0.0,
        )  # fmt: skip
        tl.debug_barrier()  # it may be the slot that is written
        value = tl.where(new[:, None], value.to(pool.dtype.element_ty), held)
        tl.store(
            pool + into * slot_stride + k[:, None] * row_stride + c[None, :], value,
            mask=kept[:, None] & inside[None, :],
        )  # fmt: skip


@triton.jit(do_not_specialize=["pieces", "query_token", "key_token", "value_token", "decay_token", "beta_token"])
def delta_rule(
    out, query, key, value, decay, beta, pool, starts, reads, writes, pieces, scale,
    query_token, query_head, key_token, key_head, value_token, value_head, decay_token, decay_head, beta_token,
    beta_head, slot_stride,
    HEADS: tl.constexpr, REPEAT: tl.constexpr, DIM: tl.constexpr, D_PAD: tl.constexpr, COLUMNS: tl.constexpr,
    BLOCK_E: tl.constexpr, PER_CHANNEL: tl.constexpr,
):  # fmt: skip
    """out [T, H, E] float32, pool [N, H, D, E] float32. Grid: (pieces, H, blocks of E)."""
    piece = tl.program_id(0)
    first = tl.load(starts + piece).to(tl.int64)
    stop = tl.load(starts + piece + 1).to(tl.int64)
    if (first == stop) | follows(piece, pieces, reads, writes):
        return
    head = tl.program_id(1)
    d = tl.arange(0, D_PAD)
    e = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    has_d = d < DIM
    has_e = e < COLUMNS
    place = head * (DIM * COLUMNS) + d[:, None] * COLUMNS + e[None, :]
    mask = has_d[:, None] & has_e[None, :]
    state = tl.load(pool + tl.load(reads + piece).to(tl.int64) * slot_stride + place, mask=mask, other=0.0)
    query += head // REPEAT * query_head + d
    key += head // REPEAT * key_head + d
    value += head * value_head + e
    decay += head * decay_head
    beta += head * beta_head
    out += head * COLUMNS + e
    more = True
    while more:
        for token in range(first, stop):
            q = tl.load(query + token * query_token, mask=has_d, other=0.0).to(tl.float32)
            k = tl.load(key + token * key_token, mask=has_d, other=0.0).to(tl.float32)
            v = tl.load(value + token * value_token, mask=has_e, other=0.0).to(tl.float32)
            b = tl.load(beta + token * beta_token).to(tl.float32)
            q = q * tl.rsqrt(tl.sum(q * q, 0) + 1e-6) * scale
            k = k * tl.rsqrt(tl.sum(k * k, 0) + 1e-6)
            if PER_CHANNEL:
                kept = tl.exp(tl.load(decay + token * decay_token + d, mask=has_d, other=0.0).to(tl.float32))
                state = state * kept[:, None]
            else:
                state = state * tl.exp(tl.load(decay + token * decay_token).to(tl.float32))
            change = (v - tl.sum(state * k[:, None], 0)) * b
            state += k[:, None] * change[None, :]
            tl.store(out + token * (HEADS * COLUMNS), tl.sum(state * q[:, None], 0), mask=has_e)
        into = tl.load(writes + piece).to(tl.int64)
        if into != 0:
            tl.store(pool + into * slot_stride + place, state, mask=mask)
        piece += 1
        more = follows(piece, pieces, reads, writes)
        first = stop
        stop = tl.load(starts + tl.minimum(piece + 1, pieces)).to(tl.int64)


@triton.jit(do_not_specialize=["pieces", "x_token", "dt_token", "key_token", "query_token"])
def ssd(
    out, x, dt, decay, key, query, skip, dt_bias, pool, starts, reads, writes, pieces, least, most,
    x_token, x_head, dt_token, dt_head, key_token, key_group, query_token, query_group, slot_stride,
    HEADS: tl.constexpr, REPEAT: tl.constexpr, CHANNELS: tl.constexpr, BLOCK_E: tl.constexpr, DIM: tl.constexpr,
    D_PAD: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """out [T, H, E] float32, pool [N, H, E, D] float32. Grid: (pieces, H, blocks of E)."""
    piece = tl.program_id(0)
    first = tl.load(starts + piece).to(tl.int64)
    stop = tl.load(starts + piece + 1).to(tl.int64)
    if (first == stop) | follows(piece, pieces, reads, writes):
        return
    head = tl.program_id(1)
    d = tl.arange(0, D_PAD)
    e = tl.program_id(2) * BLOCK_E + tl.arange(0, BLOCK_E)
    has_d = d < DIM
    has_e = e < CHANNELS
    place = head * (CHANNELS * DIM) + e[:, None] * DIM + d[None, :]
    mask = has_e[:, None] & has_d[None, :]
    state = tl.load(pool + tl.load(reads + piece).to(tl.int64) * slot_stride + place, mask=mask, other=0.0)
    rate = tl.load(decay + head).to(tl.float32)
    passed = 0.0
    if HAS_SKIP:
        passed = tl.load(skip + head).to(tl.float32)
    bias = 0.0
    if HAS_BIAS:
        bias = tl.load(dt_bias + head).to(tl.float32)
    x += head * x_head + e
    dt += head * dt_head
    key += head // REPEAT * key_group + d
    query += head // REPEAT * query_group + d
    out += head * CHANNELS + e
    more = True
    while more:
        for token in range(first, stop):
            step = softplus(tl.load(dt + token * dt_token).to(tl.float32) + bias)
            step = tl.minimum(tl.maximum(step, least), most)
            u = tl.load(x + token * x_token, mask=has_e, other=0.0).to(tl.float32)
            k = tl.load(key + token * key_token, mask=has_d, other=0.0).to(tl.float32)
            q = tl.load(query + token * query_token, mask=has_d, other=0.0).to(tl.float32)
            state = state * tl.exp(step * rate) + (step * u)[:, None] * k[None, :]
            tl.store(out + token * (HEADS * CHANNELS), tl.sum(state * q[None, :], 1) + passed * u, mask=has_e)
        into = tl.load(writes + piece).to(tl.int64)
        if into != 0:
            tl.store(pool + into * slot_stride + place, state, mask=mask)
        piece += 1
        more = follows(piece, pieces, reads, writes)
        first = stop
        stop = tl.load(starts + tl.minimum(piece + 1, pieces)).to(tl.int64)


@triton.jit(do_not_specialize=["pieces", "x_token", "dt_token", "key_token", "query_token", "gate_token"])
def selective_scan(
    out, x, dt, decay, key, query, skip, gate, dt_bias, pool, starts, reads, writes, pieces, channels,
    x_token, dt_token, key_token, query_token, gate_token, slot_stride,
    BLOCK_C: tl.constexpr, DIM: tl.constexpr, D_PAD: tl.constexpr, HAS_SKIP: tl.constexpr, HAS_GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """out [T, C] float32, decay [C, D], pool [N, C, D] float32. Grid: (pieces, blocks of C)."""
    piece = tl.program_id(0)
    first = tl.load(starts + piece).to(tl.int64)
    stop = tl.load(starts + piece + 1).to(tl.int64)
    if (first == stop) | follows(piece, pieces, reads, writes):
        return
    d = tl.arange(0, D_PAD)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    has_d = d < DIM
    has_c = c < channels
    place = c[:, None] * DIM + d[None, :]
    mask = has_c[:, None] & has_d[None, :]
    state = tl.load(pool + tl.load(reads + piece).to(tl.int64) * slot_stride + place, mask=mask, other=0.0)
    rates = tl.load(decay + place, mask=mask, other=0.0).to(tl.float32)
    passed = tl.full([BLOCK_C], 0.0, tl.float32)
    if HAS_SKIP:
        passed = tl.load(skip + c, mask=has_c, other=0.0).to(tl.float32)
    bias = tl.full([BLOCK_C], 0.0, tl.float32)
    if HAS_BIAS:
        bias = tl.load(dt_bias + c, mask=has_c, other=0.0).to(tl.float32)
    more = True
    while more:
        for token in range(first, stop):
            step = softplus(tl.load(dt + token * dt_token + c, mask=has_c, other=0.0).to(tl.float32) + bias)
            u = tl.load(x + token * x_token + c, mask=has_c, other=0.0).to(tl.float32)
            k = tl.load(key + token * key_token + d, mask=has_d, other=0.0).to(tl.float32)
            q = tl.load(query + token * query_token + d, mask=has_d, other=0.0).to(tl.float32)
            state = tl.exp(step[:, None] * rates) * state + (step * u)[:, None] * k[None, :]
            total = tl.sum(state * q[None, :], 1) + passed * u
            if HAS_GATE:
                total = total * silu(tl.load(gate + token * gate_token + c, mask=has_c, other=0.0).to(tl.float32))
            tl.store(out + token * channels + c, total, mask=has_c)
        into = tl.load(writes + piece).to(tl.int64)
        if into != 0:
            tl.store(pool + into * slot_stride + place, state, mask=mask)
        piece += 1
        more = follows(piece, pieces, reads, writes)
        first = stop
        stop = tl.load(starts + tl.minimum(piece + 1, pieces)).to(tl.int64)


@triton.jit(do_not_specialize=["x_row", "gate_row"])
def gated_rms_norm(
    out, x, gate, weight, eps, x_row, gate_row, columns,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, GATE_FIRST: tl.constexpr,
):  # fmt: skip
    """x, gate, out [rows, N], weight [N]. Grid: (rows, groups)."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.arange(0, BLOCK)
    inside = n < GROUP
    n += tl.program_id(1) * GROUP
    wide = tl.load(x + row * x_row + n, mask=inside, other=0.0).to(tl.float32)
    factor = silu(tl.load(gate + row * gate_row + n, mask=inside, other=0.0).to(tl.float32))
    if GATE_FIRST:
        wide = wide * factor
    normed = wide * tl.rsqrt(tl.sum(wide * wide, 0) / GROUP + eps)
    kind = out.dtype.element_ty
    done = normed.to(kind).to(tl.float32) * tl.load(weight + n, mask=inside, other=0.0).to(tl.float32)
    done = done.to(kind)
    if not GATE_FIRST:
        done = (done.to(tl.float32) * factor).to(kind)
    tl.store(out + row * columns + n, done, mask=inside)

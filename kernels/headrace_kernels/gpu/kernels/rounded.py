"""Rows rounded to e4m3. A program computes one row, as a tile [G, S] of groups that have a scale each."""

import triton
import triton.language as tl

from headrace_kernels.gpu.kernels.numbers import encode_e4m3


@triton.jit
def _row(N: tl.constexpr, G: tl.constexpr, S: tl.constexpr):
    """Places of a row's entries [G, S], and which of them exist."""
    place = tl.arange(0, G)[:, None] * S + tl.arange(0, S)[None, :]
    return place, place < N


@triton.jit
def _store(codes, scales, scale_row, scale_group, row, values, N: tl.constexpr, G: tl.constexpr, S: tl.constexpr):
    """values [G, S] float32, zeros beyond N; S >= N of a single group."""
    place, mask = _row(N, G, S)
    scale = tl.maximum(tl.div_rn(tl.max(tl.abs(values), 1), 448.0), 1e-30)
    group = tl.arange(0, G)
    tl.store(scales + row * scale_row + group * scale_group, scale, mask=group * S < N)
    code = encode_e4m3(tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape)))
    tl.store(codes + row * N + place, code, mask=mask)


@triton.jit
def round_rows(
    codes, scales, scale_row, scale_group, x, x_row, N: tl.constexpr, G: tl.constexpr, S: tl.constexpr
):  # fmt: skip
    """x [rows, N]. Grid: (rows)."""
    row = tl.program_id(0).to(tl.int64)
    place, mask = _row(N, G, S)
    values = tl.load(x + row * x_row + place, mask=mask, other=0.0).to(tl.float32)
    _store(codes, scales, scale_row, scale_group, row, values, N, G, S)


@triton.jit
def rounded_rms_norm(
    codes, scales, scale_row, scale_group, total, x, residual, weight, x_row, residual_row, eps,
    ADD: tl.constexpr, N: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
):  # fmt: skip
    """The norm of x [rows, N]; with ADD, of ``total = x + residual``. Grid: (rows)."""
    row = tl.program_id(0).to(tl.int64)
    place, mask = _row(N, G, S)
    wide = tl.load(x + row * x_row + place, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        wide += tl.load(residual + row * residual_row + place, mask=mask, other=0.0).to(tl.float32)
        rounded = wide.to(total.dtype.element_ty)
        tl.store(total + row * N + place, rounded, mask=mask)
        wide = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(tl.sum(wide * wide, 1), 0) / N + eps)
    normed = (wide * factor).to(x.dtype.element_ty).to(tl.float32)
    scaled = normed * tl.load(weight + place, mask=mask, other=0.0).to(tl.float32)
    values = scaled.to(x.dtype.element_ty).to(tl.float32)
    _store(codes, scales, scale_row, scale_group, row, values, N, G, S)


@triton.jit
def rounded_silu_mul(
    codes, scales, scale_row, scale_group, gate, up, gate_row, up_row, N: tl.constexpr, G: tl.constexpr,
    S: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of [rows, N]. Grid: (rows)."""
    row = tl.program_id(0).to(tl.int64)
    place, mask = _row(N, G, S)
    x = tl.load(gate + row * gate_row + place, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_row + place, mask=mask, other=0.0).to(tl.float32)
    silu = (x / (1.0 + tl.exp(-x))).to(gate.dtype.element_ty).to(tl.float32)
    values = (silu * y).to(gate.dtype.element_ty).to(tl.float32)
    _store(codes, scales, scale_row, scale_group, row, values, N, G, S)

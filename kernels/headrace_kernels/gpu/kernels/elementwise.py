"""Norms, activation, rotary angles: a program computes whole rows, so a row's result does not depend on its batch."""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["rows"])
def rms_norm(
    out, total, x, residual, weight, rows, inner, x_outer, x_inner, residual_outer, residual_inner, eps,
    ADD: tl.constexpr, N: tl.constexpr, N_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Row r = (r // inner, r % inner) of x [rows, N]; with ADD, of ``total = x + residual``. Grid: (rows / ROWS)."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.arange(0, N_PAD)
    mask = (row < rows)[:, None] & (n < N)[None, :]
    place = ((row // inner) * x_outer + (row % inner) * x_inner)[:, None] + n[None, :]
    values = tl.load(x + place, mask=mask, other=0.0)
    wide = values.to(tl.float32)
    flat = row[:, None] * N + n[None, :]
    if ADD:
        place = ((row // inner) * residual_outer + (row % inner) * residual_inner)[:, None] + n[None, :]
        wide += tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)
        rounded = wide.to(total.dtype.element_ty)
        tl.store(total + flat, rounded, mask=mask)
        wide = rounded.to(tl.float32)
    factor = tl.rsqrt(tl.sum(wide * wide, 1) / N + eps)
    normed = (wide * factor[:, None]).to(x.dtype.element_ty).to(tl.float32)
    scale = tl.load(weight + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + flat, (normed * scale[None, :]).to(out.dtype.element_ty), mask=mask)


@triton.jit
def rope_angles(
    cos_out, sin_out, positions, position_stride, frequencies, factor, HALF: tl.constexpr, HALF_PAD: tl.constexpr
):
    """cos and sin [T, 2 HALF] of a position's angles, twice side by side. Grid: (T)."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, HALF_PAD)
    mask = d < HALF
    angles = tl.load(positions + token * position_stride).to(tl.float32) * tl.load(
        frequencies + d, mask=mask, other=0.0
    )
    cos = (tl.cos(angles) * factor).to(cos_out.dtype.element_ty)
    sin = (tl.sin(angles) * factor).to(sin_out.dtype.element_ty)
    into = token * 2 * HALF + d
    tl.store(cos_out + into, cos, mask=mask)
    tl.store(cos_out + into + HALF, cos, mask=mask)
    tl.store(sin_out + into, sin, mask=mask)
    tl.store(sin_out + into + HALF, sin, mask=mask)


@triton.jit
def silu_mul(out, gate, up, gate_row, up_row, N: tl.constexpr, BLOCK: tl.constexpr):
    """silu(gate) * up of [rows, N]. Grid: (rows, N / BLOCK)."""
    row = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = n < N
    x = tl.load(gate + row * gate_row + n, mask=mask, other=0.0).to(tl.float32)
    y = tl.load(up + row * up_row + n, mask=mask, other=0.0).to(tl.float32)
    silu = (x / (1.0 + tl.exp(-x))).to(gate.dtype.element_ty).to(tl.float32)
    tl.store(out + row * N + n, (silu * y).to(out.dtype.element_ty), mask=mask)

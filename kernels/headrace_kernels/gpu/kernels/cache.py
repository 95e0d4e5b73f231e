"""Kernels that store keys and values in the paged cache, plain or quantized, with or without rotary embedding."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from headrace_kernels.gpu.kernels.numbers import encode_e4m3, round_to_int8


@triton.jit
def head_scale(largest, check, QUANT: tl.constexpr):
    """Scale [K] of heads from their largest magnitudes; not a number if ``check`` (a sum of 0 * x) is none."""
    steps = 127.0 if QUANT == 1 else 448.0
    return tl.maximum(tl.div_rn(largest, tl.full(largest.shape, steps, tl.float32)), 1e-30) + check


@triton.jit
def as_stored(x, scale, target, QUANT: tl.constexpr):
    """Values [K, D] in the pool's format."""
    if QUANT == 1:
        return round_to_int8(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)))
    if QUANT == 2:
        return encode_e4m3(tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape)))
    return x.to(target.dtype.element_ty)


@triton.jit
def store_heads(
    source, source_head, pool, scales, slot, block_stride, head_stride, slot_stride, scale_block_stride, scale_head,
    KV_HEADS: tl.constexpr, K_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """Stores one token's heads [K, D] at its slot."""
    h = tl.arange(0, K_PAD)
    d = tl.arange(0, D_PAD)
    mask = (h < KV_HEADS)[:, None] & (d < HEAD_DIM)[None, :]
    x = tl.load(source + (h * source_head)[:, None] + d[None, :], mask=mask, other=0.0).to(tl.float32)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    scale = tl.full([K_PAD], 1.0, tl.float32)
    if QUANT:
        scale = head_scale(tl.max(tl.abs(x), 1), tl.sum(x * 0.0, 1), QUANT)
        tl.store(scales + block * scale_block_stride + h * scale_head + offset, scale, mask=h < KV_HEADS)
    into = pool + block * block_stride + offset * slot_stride + (h * head_stride)[:, None] + d[None, :]
    tl.store(into, as_stored(x, scale, pool, QUANT), mask=mask)


@triton.jit
def load_heads(
    source, source_head, weight, eps,
    HEADS: tl.constexpr, H_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """One token's heads as float32: what is rotated, in halves [H, HALF], and the rest [H, REST]; with NORM, normalized
    and rounded as an RMSNorm of the source's format does.
    """
    h = tl.arange(0, H_PAD)
    d = tl.arange(0, HALF_PAD)
    rest = 2 * HALF + tl.arange(0, REST_PAD)
    mask = (h < HEADS)[:, None] & (d < HALF)[None, :]
    rest_mask = (h < HEADS)[:, None] & (rest < HEAD_DIM)[None, :]
    start = source + (h * source_head)[:, None]
    first = tl.load(start + d[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(start + HALF + d[None, :], mask=mask, other=0.0).to(tl.float32)
    third = tl.load(start + rest[None, :], mask=rest_mask, other=0.0).to(tl.float32)
    if NORM:
        squares = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(third * third, 1)
        factor = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
        round_to = source.dtype.element_ty
        scale = tl.load(weight + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
        first = ((first * factor).to(round_to).to(tl.float32) * scale).to(round_to).to(tl.float32)
        scale = tl.load(weight + HALF + d, mask=d < HALF, other=0.0).to(tl.float32)[None, :]
        second = ((second * factor).to(round_to).to(tl.float32) * scale).to(round_to).to(tl.float32)
        scale = tl.load(weight + rest, mask=rest < HEAD_DIM, other=0.0).to(tl.float32)[None, :]
        third = ((third * factor).to(round_to).to(tl.float32) * scale).to(round_to).to(tl.float32)
    return first, second, third, mask, rest_mask


@triton.jit
def rotate(first, second, cos, sin, round_to: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr):
    """Halves [H, HALF] rotated, rounded, as float32."""
    d = tl.arange(0, HALF_PAD)
    near = d < HALF
    cos_a = tl.load(cos + d, mask=near, other=0.0).to(tl.float32)
    cos_b = tl.load(cos + HALF + d, mask=near, other=0.0).to(tl.float32)
    sin_a = tl.load(sin + d, mask=near, other=0.0).to(tl.float32)
    sin_b = tl.load(sin + HALF + d, mask=near, other=0.0).to(tl.float32)
    turned = first * cos_a[None, :] - second * sin_a[None, :]
    other = second * cos_b[None, :] + first * sin_b[None, :]
    return turned.to(round_to).to(tl.float32), other.to(round_to).to(tl.float32)


@triton.jit
def rotate_heads(
    out, source, source_head, cos, sin, weight, eps,
    HEADS: tl.constexpr, H_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Rotates one token's heads [H, D] into contiguous memory."""
    first, second, third, mask, rest_mask = load_heads(
        source, source_head, weight, eps, HEADS, H_PAD, HEAD_DIM, HALF, HALF_PAD, REST_PAD, NORM
    )
    first, second = rotate(first, second, cos, sin, source.dtype.element_ty, HALF, HALF_PAD)
    place = out + (tl.arange(0, H_PAD) * HEAD_DIM)[:, None]
    d = tl.arange(0, HALF_PAD)
    tl.store(place + d[None, :], first.to(out.dtype.element_ty), mask=mask)
    tl.store(place + HALF + d[None, :], second.to(out.dtype.element_ty), mask=mask)
    if HEAD_DIM > 2 * HALF:
        rest = 2 * HALF + tl.arange(0, REST_PAD)
        tl.store(place + rest[None, :], third.to(out.dtype.element_ty), mask=rest_mask)


@triton.jit
def store_rotated(
    source, source_head, cos, sin, weight, eps, pool, scales, slot, block_stride, head_stride, slot_stride,
    scale_block_stride, scale_head,
    KV_HEADS: tl.constexpr, K_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr,
    REST_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr, QUANT: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """Rotates one token's key heads [K, D] and stores them at its slot."""
    first, second, third, mask, rest_mask = load_heads(
        source, source_head, weight, eps, KV_HEADS, K_PAD, HEAD_DIM, HALF, HALF_PAD, REST_PAD, NORM
    )
    first, second = rotate(first, second, cos, sin, source.dtype.element_ty, HALF, HALF_PAD)
    h = tl.arange(0, K_PAD)
    d = tl.arange(0, HALF_PAD)
    rest = 2 * HALF + tl.arange(0, REST_PAD)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    scale = tl.full([K_PAD], 1.0, tl.float32)
    if QUANT:
        largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
        largest = tl.maximum(largest, tl.max(tl.abs(third), 1))
        check = tl.sum((first + second) * 0.0, 1) + tl.sum(third * 0.0, 1)
        scale = head_scale(largest, check, QUANT)
        tl.store(scales + block * scale_block_stride + h * scale_head + offset, scale, mask=h < KV_HEADS)
    into = pool + block * block_stride + offset * slot_stride + (h * head_stride)[:, None]
    tl.store(into + d[None, :], as_stored(first, scale, pool, QUANT), mask=mask)
    tl.store(into + HALF + d[None, :], as_stored(second, scale, pool, QUANT), mask=mask)
    if HEAD_DIM > 2 * HALF:
        tl.store(into + rest[None, :], as_stored(third, scale, pool, QUANT), mask=rest_mask)


@triton.jit
def write_kv(
    key, value, keys, values, key_scales, value_scales, slots, key_token, key_head, value_token, value_head,
    block_stride, head_stride, slot_stride, scale_block_stride, scale_head,
    KV_HEADS: tl.constexpr, K_PAD: tl.constexpr, HEAD_DIM: tl.constexpr, D_PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, QUANT: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, 2): keys, then values."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    if tl.program_id(1) == 0:
        store_heads(
            key + token * key_token, key_head, keys, key_scales, slot, block_stride, head_stride, slot_stride,
            scale_block_stride, scale_head, KV_HEADS, K_PAD, HEAD_DIM, D_PAD, BLOCK_SIZE, QUANT,
        )  # fmt: skip
    else:
        store_heads(
            value + token * value_token, value_head, values, value_scales, slot, block_stride, head_stride,
            slot_stride, scale_block_stride, scale_head, KV_HEADS, K_PAD, HEAD_DIM, D_PAD, BLOCK_SIZE, QUANT,
        )  # fmt: skip


@triton.jit
def rope_write_kv(
    out, query, key, value, cos, sin, query_weight, key_weight, keys, values, key_scales, value_scales, slots,
    query_token, query_head, key_token, key_head, value_token, value_head, cos_token, sin_token,
    block_stride, head_stride, slot_stride, scale_block_stride, scale_head, eps,
    HEADS: tl.constexpr, H_PAD: tl.constexpr, KV_HEADS: tl.constexpr, K_PAD: tl.constexpr, HEAD_DIM: tl.constexpr,
    D_PAD: tl.constexpr, HALF: tl.constexpr, HALF_PAD: tl.constexpr, REST_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    QUANT: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid: (tokens, 3): queries into ``out``, keys and values into the pool. NORM: of each head before.

    EARLY: the next kernel may be launched as soon as this one runs.
    """
    if EARLY:
        gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    cos += token * cos_token
    sin += token * sin_token
    if part == 0:
        rotate_heads(
            out + token * HEADS * HEAD_DIM, query + token * query_token, query_head, cos, sin, query_weight, eps,
            HEADS, H_PAD, HEAD_DIM, HALF, HALF_PAD, REST_PAD, NORM,
        )  # fmt: skip
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            if part == 1:
                store_rotated(
                    key + token * key_token, key_head, cos, sin, key_weight, eps, keys, key_scales, slot, block_stride,
                    head_stride, slot_stride, scale_block_stride, scale_head, KV_HEADS, K_PAD, HEAD_DIM, HALF, HALF_PAD,
                    REST_PAD, BLOCK_SIZE, QUANT, NORM,
                )  # fmt: skip
            else:
                store_heads(
                    value + token * value_token, value_head, values, value_scales, slot, block_stride, head_stride,
                    slot_stride, scale_block_stride, scale_head, KV_HEADS, K_PAD, HEAD_DIM, D_PAD, BLOCK_SIZE, QUANT,
                )  # fmt: skip


@triton.jit(do_not_specialize=["row_stride"])
def write_part(
    rows, part, slots, row_stride, row_head, block_stride, head_stride, slot_stride,
    HEADS: tl.constexpr, HEADS_PAD: tl.constexpr, SIZE: tl.constexpr, SIZE_PAD: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """rows [T, K, D] into keys or values [B, K, P, D]. Grid: (tokens)."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token)
    if slot < 0:
        return
    k = tl.arange(0, HEADS_PAD)[:, None]
    d = tl.arange(0, SIZE_PAD)[None, :]
    mask = (k < HEADS) & (d < SIZE)
    value = tl.load(rows + token * row_stride + k * row_head + d, mask=mask)
    into = part + slot // BLOCK_SIZE * block_stride + slot % BLOCK_SIZE * slot_stride + k * head_stride + d
    tl.store(into, value.to(part.dtype.element_ty), mask=mask)

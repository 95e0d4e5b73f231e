"""Storing keys and values: rotated or not, in every format of the pool, by every backend."""

import pytest
import torch

from headrace_kernels import AttentionMeta, catalog, kv_format
from headrace_kernels.kv_format import LARGEST, SCALE_BYTES, CacheFormatError
from headrace_kernels.meta import HeadNorms
from headrace_kernels.reference.elementwise import apply_rope, rms_norm

BACKENDS = catalog.ROPE_WRITE_KV.available()
FORMATS = [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn]


def _pool(
    dtype: torch.dtype, blocks: int = 6, heads: int = 2, size: int = 16, dim: int = 32
) -> tuple[torch.Tensor, torch.Tensor | None]:
    if dtype not in LARGEST:
        return torch.zeros(2, blocks, heads, size, dim, dtype=dtype), None
    memory = torch.zeros(2, blocks, heads * size * (dim + SCALE_BYTES), dtype=torch.uint8)
    name = next(name for name, each in kv_format.FORMATS.items() if each is dtype)
    return kv_format.split(memory, heads, size, name)


def _plain(pool: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return pool.float() if scale is None else pool.float() * scale[..., None]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize(("tokens", "rotary"), [(1, 32), (7, 32), (40, 16)])
def test_rope_and_store_in_one(backend: str, dtype: torch.dtype, tokens: int, rotary: int) -> None:
    """Equals rope followed by a store, up to the format's precision; skipped slots stay unchanged."""
    merged = torch.randn(tokens, 8, 32)  # slices of one projection, as in the model
    query, key, value = merged.split((4, 2, 2), 1)
    angle = torch.randn(tokens, rotary // 2).repeat(1, 2)
    cos, sin = angle.cos(), angle.sin()
    slots = torch.randperm(96)[:tokens]
    slots[::3] = -1
    pool, scale = _pool(dtype)
    expected_query, rotated = apply_rope(query.clone(), key.clone(), cos, sin)
    kept = value.clone()
    out = catalog.ROPE_WRITE_KV.named(backend)(query, key, value, cos, sin, pool, slots, scale)
    torch.testing.assert_close(out, expected_query, atol=1e-6, rtol=1e-5)
    assert torch.equal(value, kept)
    stored = _plain(pool, scale).permute(0, 1, 3, 2, 4).reshape(2, 96, 2, 32)
    written = slots[slots >= 0]
    coarse = {torch.float32: 1e-6, torch.bfloat16: 2e-2, torch.int8: 2e-2, torch.float8_e4m3fn: 0.15}[dtype]
    for part, x in enumerate((rotated, value)):
        torch.testing.assert_close(stored[part, written], x[slots >= 0].float(), atol=coarse, rtol=coarse)
    untouched = torch.ones(96, dtype=torch.bool)
    untouched[written] = False
    assert not stored[:, untouched].any()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rotary", [32, 16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_heads_are_normalized_first(backend: str, dtype: torch.dtype, rotary: int) -> None:
    """As norms on their own, up to one rounding of the format."""
    query, key, value = torch.randn(7, 8, 32).to(dtype).split((4, 2, 2), 1)
    angle = torch.randn(7, rotary // 2).repeat(1, 2)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    norms = HeadNorms(torch.randn(32).to(dtype), torch.randn(32).to(dtype), 1e-5)
    slots, (pool, _), (plain, _) = torch.randperm(96)[:7], _pool(dtype), _pool(dtype)
    expected = catalog.ROPE_WRITE_KV.named("torch")(
        rms_norm(query, norms.query, norms.eps), rms_norm(key, norms.key, norms.eps), value, cos, sin, plain, slots
    )
    out = catalog.ROPE_WRITE_KV.named(backend)(query, key, value, cos, sin, pool, slots, norms=norms)
    close = {torch.float32: 1e-5, torch.float16: 4e-3}[dtype]
    torch.testing.assert_close(out, expected, atol=close, rtol=close)
    torch.testing.assert_close(pool, plain, atol=close, rtol=close)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
def test_attention_over_8_bits(backend: str, dtype: torch.dtype) -> None:
    """Values stored in 8 bits are read back as number times scale."""
    pool, scale = _pool(dtype)
    key, value = torch.randn(40, 2, 32) * 3, torch.randn(40, 2, 32)
    slots = torch.arange(16, 56)
    catalog.WRITE_KV.named(backend)(key, value, pool, slots, scale)
    meta = AttentionMeta(
        torch.tensor([0, 2], dtype=torch.int32), torch.tensor([40], dtype=torch.int32),
        torch.tensor([[1, 2, 3]], dtype=torch.int32), slots[-2:], 2, 40,
    )  # fmt: skip
    query = torch.randn(2, 4, 32)
    out = catalog.PAGED_ATTENTION.named(backend)(query, pool, meta, scale=0.2, kv_scale=scale)
    plain = catalog.PAGED_ATTENTION.named("torch")(query, _plain(pool, scale), meta, scale=0.2)
    torch.testing.assert_close(out, plain, atol=1e-5, rtol=1e-4)


def test_formats_and_scales_must_match() -> None:
    plain, _ = _pool(torch.float32)
    small, scale = _pool(torch.int8)
    x, slots = torch.randn(1, 2, 32), torch.tensor([3])
    assert scale is not None
    from headrace_kernels import ops

    for pool, wrong in ((plain, scale), (small, None), (small, scale[:, :2])):
        with pytest.raises(CacheFormatError):
            ops.write_kv(x, x, pool, slots, wrong)

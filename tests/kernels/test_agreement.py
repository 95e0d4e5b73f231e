"""Every op, every backend, every dtype: agreement with the torch reference on inputs that are new in each run."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch

from headrace_kernels import AttentionMeta, DrawOptions, catalog
from headrace_kernels.meta import StateMeta
from headrace_kernels.packed import pack_dense

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# The difference of one rounding of the format, and of the interpreter, which truncates bfloat16 instead of rounding it.
COARSE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}


def _rows(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(dtype)


def _attention(dtype: torch.dtype, window: int, sinks: bool) -> tuple[tuple[Any, ...], dict[str, Any]]:
    lens = [(1, 33), (18, 18), (1, 200), (4, 48)]
    starts = torch.tensor([0, *(count for count, _ in lens)]).cumsum(0).int()
    tables = torch.randperm(60).int().view(4, 15)
    meta = AttentionMeta(starts, torch.tensor([n for _, n in lens]).int(), tables, torch.empty(0), 18, 200)
    query, pool = _rows(dtype, 24, 6, 48), _rows(dtype, 2, 60, 2, 16, 48)
    options = {"scale": 0.2, "window": window, "softcap": 20.0, "sinks": torch.randn(6).to(dtype) if sinks else None}
    return (query, pool, meta), options


def _cases(dtype: torch.dtype) -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """(op, arguments, options) of the ops that return their result."""
    wide, weight = _rows(dtype, 5, 200), _rows(dtype, 200)
    heads, table = _rows(dtype, 9, 8, 40), _rows(dtype, 9, 24)
    keys = torch.randint(-(2**62), 2**62, (3,))
    scores = torch.randn(3, 9000) * 5
    scores[:, ::5] = float("-inf")
    yield catalog.RMS_NORM, (wide, weight, 1e-6), {}
    yield catalog.RMS_NORM, (heads[:, 2:7], weight[:40], 1e-6), {}
    yield catalog.ADD_RMS_NORM, (wide, wide.flip(0), weight, 1e-6), {}
    yield catalog.GATED_RMS_NORM, (wide, wide.flip(0), weight, 1e-6), {}
    yield catalog.GATED_RMS_NORM, (wide[:, 40:], wide[:, :160], weight[:160], 1e-6, 20, False), {}
    yield catalog.ROPE_ANGLES, (torch.arange(9) * 1000, torch.rand(24), 1.1, dtype), {}
    yield catalog.SILU_MUL, (wide,), {}
    yield catalog.SILU_MUL, (wide[:, 20:174],), {}
    yield catalog.GELU_MUL, (wide[:, 20:174],), {}
    yield catalog.SIGMOID, (wide[:, 20:173],), {}
    yield catalog.SOFTPLUS, (wide[:, 20:173] * 9,), {}
    pool = torch.zeros(2, 1, 2, 16, 40, dtype=dtype)
    rotated = heads[:, :4], heads[:, 4:6], heads[:, 6:], table, table.flip(0)
    yield catalog.ROPE_WRITE_KV, (*rotated, pool, torch.arange(9)), {}
    yield catalog.PACKED_MATMUL, (wide, pack_dense(torch.randn(33, 200)), None, False), {}
    yield catalog.PACKED_ROWS, (pack_dense(torch.randn(33, 200)), torch.tensor([[5], [32]])), {}
    steps = StateMeta(*(torch.tensor(part, dtype=torch.int32) for part in ([0, 4, 9], [1, 2], [1, 2])))
    taps, inputs = _rows(dtype, 200, 3) / 3, _rows(dtype, 3, 2, 200)
    yield catalog.CAUSAL_CONV, (_rows(dtype, 9, 200), taps, inputs, steps, weight, True), {}
    gates, states = torch.rand(9, 4), torch.randn(3, 4, 40, 40)
    yield catalog.DELTA_RULE, (heads[:, :2], heads[:, 2:4], heads[:, 4:], -gates, gates, states, steps), {}
    yield catalog.ROW_LOGSUMEXP, (scores,), {}
    sampling = DrawOptions(torch.tensor([[0.8, 0.9, -5.0]]), keys[:2].view(1, 2).contiguous())
    first = torch.zeros(3, dtype=torch.int64)
    yield catalog.DRAW, (scores, first, keys, sampling), {}
    for window, sinks in ((0, False), (20, True)):
        arguments, options = _attention(dtype, window, sinks)
        yield catalog.PAGED_ATTENTION, arguments, options
        yield catalog.PAGED_ATTENTION, arguments, options | {"deterministic": True}
        query, pool, meta = arguments
        yield catalog.UNEVEN_ATTENTION, (query, pool[0], pool[1, ..., :32], meta), options


def _copies(arguments: tuple[Any, ...]) -> list[Any]:
    return [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_backends_agree_with_the_reference(dtype: torch.dtype) -> None:
    seed = torch.seed()
    tested = set()
    for op, arguments, options in _cases(dtype):
        expected = op.named("torch")(*_copies(arguments), **options)
        for backend in op.available():
            got = op.named(backend)(*_copies(arguments), **options)
            torch.testing.assert_close(
                got, expected, atol=COARSE[dtype], rtol=COARSE[dtype],
                msg=partial("{} by {}, seed {}: {}".format, op.name, backend, seed),
            )  # fmt: skip
        tested.add(op.name)
    assert tested == {op.name for op in catalog.ALL} - {
        "write_kv",
        "write_part",
        "select_keys",
        "ssd",
        "selective_scan",
        *("round_rows", "rounded_rms_norm", "rounded_silu_mul", "scaled_matmul"),
    }  # they have own tests


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("source", [torch.float32, torch.float16], ids=str)
def test_8_bits_are_the_same_bits(dtype: torch.dtype, source: torch.dtype) -> None:
    """Ties, subnormals, zeros and all magnitudes: every backend stores the reference's numbers and scales."""
    seed = torch.seed()
    key = torch.randn(30, 3, 72) * torch.exp(torch.randn(30, 3, 1) * 3)
    key[0] = 0.0
    key[1] *= torch.exp(-torch.rand(3, 72) * 9)  # far below the largest: subnormal in e4m3
    key[2] = torch.randint(-448, 449, (3, 72))
    key[2, :, 0] = 448.0
    key = key.clamp(-60_000, 60_000).to(source)  # NaN has its own test
    value = torch.randn(30, 3, 72).to(source)
    slots = torch.randperm(64)[:30]
    stored = {}
    for backend in catalog.WRITE_KV.available():
        pool, scale = torch.zeros(2, 4, 3, 16, 72, dtype=torch.uint8), torch.zeros(2, 4, 3, 16)
        catalog.WRITE_KV.named(backend)(key, value, pool.view(dtype), slots, scale)
        stored[backend] = pool, scale
    for backend, (pool, scale) in stored.items():
        assert torch.equal(scale, stored["torch"][1]), f"{backend}, seed {seed}"
        different = pool != stored["torch"][0]
        assert not different[pool != 128].any(), f"{backend}, seed {seed}"  # 128: torch keeps the sign of a zero


def test_a_nan_token_affects_no_other() -> None:
    """A NaN key is read back as NaN, whatever the format; adjacent ones are not affected."""
    for dtype in (torch.int8, torch.float8_e4m3fn):
        for backend in catalog.WRITE_KV.available():
            key = torch.randn(2, 1, 16)
            key[0, 0, 5] = float("nan")
            pool, scale = torch.zeros(2, 1, 1, 16, 16, dtype=torch.uint8), torch.zeros(2, 1, 1, 16)
            catalog.WRITE_KV.named(backend)(key, key, pool.view(dtype), torch.tensor([3, 4]), scale)
            assert scale[0, 0, 0, 3].isnan() and scale[0, 0, 0, 4].isfinite()

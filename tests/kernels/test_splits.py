"""How the Triton launches split keys into pieces, with small pieces: the result is the same, or even its bits."""

from typing import Any

import pytest
import torch

from headrace_kernels import AttentionMeta, catalog
from support.kernels.attention_case import make_attention_case

if "triton" not in catalog.PAGED_ATTENTION.available():
    pytest.skip("no Triton: pip install triton", allow_module_level=True)

from headrace_kernels.gpu import attention

LENS = [(1, 300), (1, 64), (20, 210), (1, 129), (1, 1), (64, 64)]


@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("programs", [1, 24])
@pytest.mark.parametrize("deterministic", [False, True])
def test_any_number_of_pieces(monkeypatch: pytest.MonkeyPatch, programs: int, window: int, deterministic: bool) -> None:
    """Fewer programs than pieces, absent pieces, sequences of one piece: all in one batch."""
    monkeypatch.setattr(attention, "CHUNK", 64)
    monkeypatch.setattr(attention, "_SPLIT_KEYS", 32)
    monkeypatch.setattr(attention, "_PROGRAMS", programs)
    monkeypatch.setattr(attention, "_PIECES", programs)
    monkeypatch.setattr(attention, "_LONG_PIECES", programs)
    case = make_attention_case(LENS, heads=4, kv_heads=2, head_dim=32, window=window)
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0])
    out = catalog.PAGED_ATTENTION.named("triton")(
        case.query, case.pool, case.meta, scale=0.2, window=window, sinks=sinks, deterministic=deterministic
    )
    torch.testing.assert_close(out, case.naive(0.2, window, 0.0, sinks).float(), atol=3e-6, rtol=2e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("window", [0, 100])
def test_bits_over_several_chunks(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, window: int) -> None:
    """A decode step whose chunks are distributed over programs has the bits of the prefill that iterates over them."""
    monkeypatch.setattr(attention, "CHUNK", 64)
    attend = catalog.PAGED_ATTENTION.named("triton")
    case = make_attention_case([(40, 300), (30, 70), (1, 129)], heads=4, kv_heads=2, head_dim=64, window=window)
    pool, query = case.pool.to(dtype), case.query.to(dtype)
    options: dict[str, Any] = {"scale": 0.125, "window": window, "deterministic": True}
    together = attend(query, pool, case.meta, **options)
    for place, row, length in ((0, 39, 300), (0, 5, 266), (1, 69, 70), (1, 40, 41), (2, 70, 129)):
        for programs in (4, 2048):
            monkeypatch.setattr(attention, "_PROGRAMS", programs)
            meta = AttentionMeta(
                torch.tensor([0, 1], dtype=torch.int32), torch.tensor([length], dtype=torch.int32),
                case.meta.block_tables[place : place + 1], torch.empty(0), 1, length,
            )  # fmt: skip
            assert torch.equal(attend(query[row : row + 1], pool, meta, **options), together[row : row + 1])

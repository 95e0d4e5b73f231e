"""PackedLinear against the definition, with every layout of its weight."""

import pytest
import torch
from torch.nn import functional

from headrace_kernels import PackedLinear


@pytest.mark.parametrize(("out", "inner"), [(1, 1), (7, 33), (96, 64), (192, 576)])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [(1,), (5,), (1, 40), (2, 3, 9)])
def test_float32(out: int, inner: int, with_bias: bool, rows: tuple[int, ...]) -> None:
    weight, x = torch.randn(out, inner), torch.randn(*rows, inner)
    bias = torch.randn(out) if with_bias else None
    got = PackedLinear(weight.clone(), bias)(x)
    expected = functional.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert got.shape == (*rows, out)
    torch.testing.assert_close(got, expected.float(), atol=1e-4, rtol=1e-4)


def test_other_dtypes_and_strided_input() -> None:
    weight, x = torch.randn(32, 48), torch.randn(48, 6).t()
    torch.testing.assert_close(PackedLinear(weight)(x), x @ weight.t(), atol=1e-5, rtol=1e-5)
    half = PackedLinear(weight.bfloat16())(x.bfloat16())
    assert half.dtype == torch.bfloat16


def test_one_copy_of_the_weight() -> None:
    layer = PackedLinear(torch.randn(64, 64))
    dense = [t for t in layer.buffers() if t.numel() == 64 * 64]
    assert len(dense) + (layer._packed is not None) == 1
    with torch.inference_mode():
        assert layer(torch.randn(2, 64)).isfinite().all()


@pytest.mark.parametrize(("out", "inner"), [(960, 576), (576, 1023), (576, 1024), (576, 1536), (100, 4096)])
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(out: int, inner: int) -> None:
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    layer, x = PackedLinear(torch.randn(out, inner), torch.randn(out)), torch.randn(130, inner)
    together = layer(x)
    for rows in (1, 2, 3, 7, 32, 65):
        assert torch.equal(layer(x[:rows]), together[:rows])
    assert layer(x[:1][None]).shape == (1, 1, out)

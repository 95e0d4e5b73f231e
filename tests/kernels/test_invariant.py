"""InvariantLinear: correct, and a row's result does not depend on other rows, bit for bit."""

import pytest
import torch
from torch.nn import functional

from headrace_kernels import InvariantLinear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("rows", [(1,), (16,), (17,), (1, 40), (2, 3, 9)])
def test_against_the_definition(dtype: torch.dtype, with_bias: bool, rows: tuple[int, ...]) -> None:
    weight, x = torch.randn(96, 64, dtype=dtype), torch.randn(*rows, 64, dtype=dtype)
    bias = torch.randn(96, dtype=dtype) if with_bias else None
    got = InvariantLinear(weight, bias, tile_rows=16)(x)
    assert got.shape == (*rows, 96) and got.dtype is dtype
    torch.testing.assert_close(
        got, functional.linear(x, weight, bias), atol=2e-1 if dtype is torch.bfloat16 else 1e-4, rtol=2e-2
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("out", "inner"), [(960, 576), (576, 1536), (100, 4096)])
def test_a_rows_bits_do_not_depend_on_other_rows(dtype: torch.dtype, out: int, inner: int) -> None:
    """Alone, in a batch, and at any place of its tile."""
    layer = InvariantLinear(torch.randn(out, inner, dtype=dtype))
    x = torch.randn(150, inner, dtype=dtype)
    together = layer(x)
    for rows in (1, 2, 7, 32, 64, 65):
        assert torch.equal(layer(x[:rows]), together[:rows])
    assert torch.equal(layer(x[77:78]), together[77:78])


def test_padding_rows_of_a_tile_have_no_effect() -> None:
    layer = InvariantLinear(torch.randn(8, 8))
    assert layer(torch.full((3, 8), float("nan"))).isnan().all()
    assert layer(torch.zeros(0, 8)).shape == (0, 8)

"""Packed weights: their values, products with them, and bits that depend on nothing else."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace_kernels import catalog, ops
from headrace_kernels.arguments import KernelArgumentError
from headrace_kernels.packed import Codes, Form, Kind, PackedWeight, pack_codes, pack_dense
from headrace_kernels.reference import packed as reference

KINDS = {Form.E4M3: Kind.E4M3, Form.E2M1: Kind.E2M1}
EXACT = 1e-6  # of the largest sum of the terms without their signs, against float64


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def _codes(form: Form, outputs: int, inputs: int, group: int, *, wide: bool, minima: bool) -> Codes:
    codes = torch.randint(0, 1 << form.bits, (outputs, inputs), dtype=torch.uint8)
    if form is Form.E4M3:
        codes = torch.where(codes & 127 == 127, codes - 1, codes)  # not a number
    dtype = torch.float32 if wide else torch.float16
    scale = (torch.rand(outputs, inputs // group) / 100).to(dtype)
    minimum = (torch.randn(outputs, inputs // group) / 10).to(dtype) if minima else None
    if form in KINDS:
        return Codes(codes, scale, kind=KINDS[form])
    return Codes(codes, scale, minimum, 0 if minima else 1 << (form.bits - 1))


def _weight(
    form: Form, outputs: int, inputs: int, group: int = 32, *, wide: bool = False, minima: bool = True
) -> tuple[PackedWeight, Tensor]:
    """Packed, and its values."""
    if form is Form.FLOAT32:
        dense = torch.randn(outputs, inputs)
        return pack_dense(dense), dense
    if form is Form.BFLOAT16:
        dense = torch.randn(outputs, inputs).bfloat16()
        return pack_dense(dense), dense.float()
    codes = _codes(form, outputs, inputs, group, wide=wide, minima=minima)
    return pack_codes(codes, form), codes.dense()


def _error(found: Tensor, x: Tensor, dense: Tensor, bias: Tensor | None = None) -> float:
    expected = x.double() @ dense.double().T + (0 if bias is None else bias.double())
    terms = x.double().abs() @ dense.double().abs().T
    return float((found.double() - expected).abs().max() / terms.max())


CASES = [
    (form, group, wide, minima)
    for form in Form
    for group in (16, 32, 64, 128)
    for wide in (False, True)
    for minima in (False, True)
    if form >= Form.CODES8 or (group, wide, minima) == (32, False, True)
    if form not in KINDS or not minima
]


@pytest.mark.parametrize(("form", "group", "wide", "minima"), CASES)
def test_values_and_products(form: Form, group: int, wide: bool, minima: bool) -> None:
    torch.manual_seed(1)
    for outputs, inputs in ((1, 128), (16, 256), (100, 640), (579, 1536)):
        packed, dense = _weight(form, outputs, inputs, group, wide=wide, minima=minima)
        assert torch.equal(reference.unpack(packed), dense)
        index = torch.randint(0, outputs, (2, 3))
        for name in catalog.PACKED_ROWS.available():
            found = catalog.PACKED_ROWS.named(name)(packed, index)
            if wide:  # codes times such a scale are rounded before the sum, or not
                torch.testing.assert_close(found, dense[index], atol=1e-6, rtol=1e-6)
            else:
                assert torch.equal(found, dense[index]), name
        bias = torch.randn(outputs)
        for rows in (1, 3, 17):
            x = torch.randn(rows, inputs)
            for name in catalog.PACKED_MATMUL.available():
                matmul = catalog.PACKED_MATMUL.named(name)
                assert _error(matmul(x, packed, bias, False), x, dense, bias) < EXACT, name
                rounded = x.bfloat16().float() if form is not Form.FLOAT32 else x
                assert _error(matmul(x, packed, bias, True), rounded, dense, bias) < EXACT, name


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("form", list(Form))
def test_a_rows_bits_depend_on_the_row_alone(form: Form, bf16: bool) -> None:
    """Not on the number of rows, of threads, and of other outputs."""
    torch.manual_seed(2)
    for outputs, inputs in ((40, 64), (1000, 1024)):
        packed, _ = _weight(form, outputs, inputs)
        x = torch.randn(61, inputs)
        whole = ops.packed_matmul(x, packed, None, bf16)
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(ops.packed_matmul(x, packed, None, bf16), whole)
            for first, last in ((0, 1), (60, 61), (5, 9), (2, 15), (0, 24), (30, 61)):
                assert torch.equal(ops.packed_matmul(x[first:last], packed, None, bf16), whole[first:last])


@pytest.mark.parametrize("mean", [0.0, 3.0])
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
@pytest.mark.parametrize("form", [Form.CODES8, Form.CODES4])
def test_sums_of_codes_and_of_minima_do_not_cancel_out(form: Form, bits: int, mean: float) -> None:
    """Codes are stored around zero, also those that do not use the whole range of their bytes, such as Q5_0's."""
    if bits > form.bits:
        pytest.skip("a code has no more bits")
    torch.manual_seed(5)
    half = 1 << (bits - 1)
    scale = torch.rand(200, 64).half()
    codes = Codes(torch.randint(0, 2 * half, (200, 2048), dtype=torch.uint8), scale, None, half)
    x = torch.randn(7, 2048) + mean
    for each in (codes, replace(codes, minimum=-(scale * half), offset=0)):
        exact = x.double() @ each.dense().double().T
        for rows in (1, 7):
            found = ops.packed_matmul(x[:rows], pack_codes(each, form)).double()
            assert (found - exact[:rows]).abs().max() < 2e-6 * exact.abs().max()


def test_outputs_and_whole_groups_of_inputs_can_be_cut() -> None:
    torch.manual_seed(3)
    codes = _codes(Form.CODES4, 64, 256, 32, wide=False, minima=True)
    dense = codes.dense()
    index = torch.randperm(64)[:20]
    assert torch.equal(codes.rows(index).dense(), dense[index])
    assert torch.equal(codes.columns(64, 192).dense(), dense[:, 64:192])
    with pytest.raises(ValueError, match="no whole groups of 32"):
        codes.columns(16, 64)


def test_arguments_that_do_not_fit_are_refused() -> None:
    packed, _ = _weight(Form.CODES8, 32, 64)
    with pytest.raises(KernelArgumentError, match="packed_matmul"):
        ops.packed_matmul(torch.randn(2, 63), packed)
    with pytest.raises(KernelArgumentError, match="packed_matmul"):
        ops.packed_matmul(torch.randn(2, 64), packed, torch.randn(31))
    with pytest.raises(ValueError, match="multiple of 8"):
        pack_codes(_codes(Form.CODES4, 16, 40, 20, wide=False, minima=True), Form.CODES4)


@settings(max_examples=40, deadline=None)
@given(
    form=st.sampled_from(list(Form)),
    outputs=st.integers(1, 70),
    groups=st.integers(1, 5),
    rows=st.integers(0, 30),
    bf16=st.booleans(),
)
def test_any_shape(form: Form, outputs: int, groups: int, rows: int, bf16: bool) -> None:
    torch.manual_seed(4)
    packed, dense = _weight(form, outputs, groups * 32)
    x = torch.randn(2, rows, groups * 32)
    found = ops.packed_matmul(x, packed, None, bf16)
    assert found.shape == (2, rows, outputs)
    rounded = x.bfloat16().float() if bf16 and form is not Form.FLOAT32 else x
    assert torch.allclose(found, rounded @ dense.T, atol=1e-3, rtol=1e-4)

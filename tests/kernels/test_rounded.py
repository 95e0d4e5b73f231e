"""Rows rounded to e4m3, alone and by norms and activations, and products of such rows."""

import pytest
import torch
from torch import Tensor

from headrace_kernels import catalog, ops
from headrace_kernels.arguments import KernelArgumentError
from headrace_kernels.gpu import rounded as gpu
from headrace_kernels.rounded import Rounded, ScaledWeight, products_of, scaled_weight

STEP = 2**-4  # of an entry, at most: e4m3 has three bits after the first
SIZES = [(3, 5, 256, True), (7, 384, True), (6, 48, False), (1, 1, 130, False), (2, 4096, True), (0, 128, True)]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(4)


def _rows(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape) * torch.logspace(-3, 3, shape[-1])).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("shape", "groups"), [(case[:-1], case[-1]) for case in SIZES])
def test_rows(shape: tuple[int, ...], groups: bool, dtype: torch.dtype) -> None:
    x = _rows(*shape, dtype=dtype)
    x.view(-1, shape[-1])[:1] = 0
    for name in catalog.ROUND_ROWS.available():
        found = catalog.ROUND_ROWS.named(name)(x, groups)
        count = shape[-1] // 128 if groups else 1
        largest = x.float().unflatten(-1, (count, -1)).abs().amax(-1)
        bound = largest.repeat_interleave(shape[-1] // count, -1) / 448 * 2**-9  # the smallest step
        error = (found.float() - x.float()).abs()
        assert found.shape == x.shape and bool((error <= x.float().abs() * STEP + bound).all())
        again = catalog.ROUND_ROWS.named("torch")(x, groups)
        rows = x[..., 0].numel()
        assert torch.equal(found.codes.view(torch.uint8)[:rows], again.codes.view(torch.uint8)[:rows])
        assert torch.equal(found.scale[:rows], again.scale[:rows])
        assert found.codes.shape[0] == (-(-rows // 4) * 4 if groups else rows)
        assert not groups or not rows or found.scale.stride() == (1, found.codes.shape[0])


@pytest.mark.parametrize("groups", [False, True])
@pytest.mark.parametrize("size", [128, 384, 1024])
def test_norms_and_activations_round_their_results(size: int, groups: bool) -> None:
    x, residual, weight = _rows(5, size), _rows(5, size), torch.rand(size)
    gate_up = torch.cat((x, residual, x), -1)[:, size:]
    for name in catalog.ROUND_ROWS.available():
        norm, silu = catalog.ROUNDED_RMS_NORM.named(name), catalog.ROUNDED_SILU_MUL.named(name)
        _close(norm(x, None, weight, 1e-5, groups)[0], ops.rms_norm(x, weight, 1e-5), groups)
        found, total = norm(x, residual, weight, 1e-5, groups)
        assert torch.equal(total, x + residual)
        _close(found, ops.rms_norm(total, weight, 1e-5), groups)
        _close(silu(gate_up, groups), ops.silu_mul(gate_up), groups)


def _close(found: Rounded, expected: Tensor, groups: bool) -> None:
    """Of entries beside the middle between two numbers another one may have been taken."""
    again = ops.round_rows(expected, groups)
    difference = (found.float() - again.float()).abs()
    assert bool((difference <= expected.abs() * 2 * STEP + 1e-6).all())
    other = difference > expected.abs() * 1e-3 + 1e-6  # scales may differ in their last bit
    assert float(other.float().mean()) < 0.02


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("blocks", [False, True])
def test_products(blocks: bool, bias: bool) -> None:
    outputs, inputs = 384, 640
    scale = torch.rand(3, 5).repeat_interleave(128, 0) if blocks else torch.rand(outputs, 1)
    weight, dense = _weight(outputs, inputs, scale)
    x = ops.round_rows(torch.randn(2, 3, inputs), blocks)
    added = torch.randn(outputs) if bias else None
    expected = x.float().double() @ dense.double().T + (0 if added is None else added.double())
    for dtype, most in ((torch.float32, 2e-6), (torch.bfloat16, 1e-2)):
        for name in catalog.SCALED_MATMUL.available():
            if name == "triton" and not _has_products(blocks):
                continue
            found = catalog.SCALED_MATMUL.named(name)(x, weight, added, dtype)
            assert found.dtype is dtype and found.shape == (2, 3, outputs)
            assert float((found.double() - expected).abs().max() / expected.abs().max()) < most
    assert gpu.scaled_matmul(_meta(x), _meta_weight(weight), None, torch.bfloat16).shape == (2, 3, outputs)


def _has_products(blocks: bool) -> bool:
    """Of the machine of the tests: its GPU, or of newer versions of torch the CPU."""
    if torch.cuda.is_available():
        supported = products_of(torch.device("cuda"))
        return supported.blocks if blocks else supported.outputs
    return not blocks and torch._C._dispatch_has_kernel_for_dispatch_key("aten::_scaled_mm_v2", "CPU")


def _weight(outputs: int, inputs: int, scale: Tensor) -> tuple[ScaledWeight, Tensor]:
    codes = torch.randn(outputs, inputs).to(torch.float8_e4m3fn)
    weight = scaled_weight(codes.view(torch.uint8), scale)
    assert weight is not None
    return weight, codes.float() * scale.repeat_interleave(inputs // scale.shape[1], 1)


def _meta(x: Rounded) -> Rounded:
    """On the device whose products check shapes and strides alone."""
    return Rounded(x.codes.to("meta"), _strided(x.scale), x.shape)


def _meta_weight(weight: ScaledWeight) -> ScaledWeight:
    return ScaledWeight(weight.codes.to("meta"), _strided(weight.scale), weight.in_blocks)


def _strided(scale: Tensor) -> Tensor:
    return torch.empty_strided(scale.shape, scale.stride(), device="meta")


def test_weights_that_have_no_such_products() -> None:
    codes = torch.zeros(256, 256, dtype=torch.uint8)
    assert scaled_weight(codes, torch.rand(256, 4)) is None  # groups of 64 inputs
    assert scaled_weight(codes, torch.rand(256, 2)) is None  # outputs of a block with several scales
    assert scaled_weight(codes[:250], torch.rand(250, 1)) is None
    assert scaled_weight(codes[:200], torch.rand(1, 2).repeat(200, 1)) is None
    assert scaled_weight(codes[:, :128], torch.rand(256, 1)) is not None
    with pytest.raises(KernelArgumentError, match="rows of 130 entries are no whole groups of 128"):
        ops.round_rows(torch.zeros(3, 130), True)

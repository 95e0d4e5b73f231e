"""Launches the kernels that round to e4m3; products of such numbers are torch's."""

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, scaled_mm

from headrace_kernels.arguments import check_halves, check_norm
from headrace_kernels.gpu.kernels import rounded as kernels
from headrace_kernels.gpu.tensors import FLOATS, flat, power_of_2
from headrace_kernels.reference import rounded as reference
from headrace_kernels.rounded import GROUP, Rounded, ScaledWeight, empty_rounded

_LARGEST_ROW = 32768  # a program holds whole rows in registers


def round_rows(x: Tensor, groups: bool) -> Rounded:
    if not _fits(x, x.shape[-1]):
        return reference.round_rows(x, groups)
    out, tile = empty_rounded(x.shape, x.device, groups=groups), _tile(x.shape[-1], groups)
    rows = flat(x)
    if rows.shape[0]:
        kernels.round_rows[(rows.shape[0],)](
            *_places(out), rows, rows.stride(0), *tile, num_warps=_warps(tile), enable_fp_fusion=False
        )
    return out


def rounded_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, groups: bool
) -> tuple[Rounded, Tensor]:
    check_norm(x, weight)
    same = residual is None or (residual.shape == x.shape and residual.dtype is x.dtype)
    if not _fits(x, x.shape[-1]) or weight.dtype is not x.dtype or not same:
        return reference.rounded_rms_norm(x, residual, weight, eps, groups)
    out, tile = empty_rounded(x.shape, x.device, groups=groups), _tile(x.shape[-1], groups)
    total = x if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    rows = flat(x)
    added = rows if residual is None else flat(residual)
    if rows.shape[0]:
        kernels.rounded_rms_norm[(rows.shape[0],)](
            *_places(out), total, rows, added, weight.contiguous(), rows.stride(0), added.stride(0), eps,
            residual is not None, *tile, num_warps=_warps(tile), enable_fp_fusion=True,
        )  # fmt: skip
    return out, total


def rounded_silu_mul(gate_up: Tensor, groups: bool) -> Rounded:
    check_halves(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    if not _fits(gate, gate.shape[-1]):
        return reference.rounded_silu_mul(gate_up, groups)
    out, tile = empty_rounded(gate.shape, gate.device, groups=groups), _tile(gate.shape[-1], groups)
    gates, ups = flat(gate), flat(up)
    if gates.shape[0]:
        kernels.rounded_silu_mul[(gates.shape[0],)](
            *_places(out), gates, ups, gates.stride(0), ups.stride(0), *tile,
            num_warps=_warps(tile), enable_fp_fusion=True,
        )  # fmt: skip
    return out


def scaled_matmul(x: Rounded, weight: ScaledWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    if weight.in_blocks:
        kinds, scale = (ScalingType.BlockWise1x128, ScalingType.BlockWise128x128), weight.scale
    else:
        kinds, scale = (ScalingType.RowWise, ScalingType.RowWise), weight.scale.T
    out = scaled_mm(
        x.codes, weight.codes.T, x.scale, kinds[0], scale, kinds[1], SwizzleType.NO_SWIZZLE, SwizzleType.NO_SWIZZLE,
        output_dtype=dtype,
    )  # fmt: skip
    out = out[: x.shape[:-1].numel()].view(*x.shape[:-1], -1)
    return out if bias is None else out + bias.to(dtype)


def _fits(x: Tensor, size: int) -> bool:
    return x.dtype in FLOATS and size <= _LARGEST_ROW


def _tile(size: int, groups: bool) -> tuple[int, int, int]:
    """Entries of a row, and its tile: groups and entries of one."""
    return (size, power_of_2(size // GROUP), GROUP) if groups else (size, 1, power_of_2(size))


def _warps(tile: tuple[int, int, int]) -> int:
    return min(16, max(4, tile[1] * tile[2] // 1024))


def _places(out: Rounded) -> tuple[Tensor, Tensor, int, int]:
    row, group = out.scale.stride()
    return out.codes.view(torch.uint8), out.scale, row, group

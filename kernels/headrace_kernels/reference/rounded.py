"""Rounding to e4m3 and its products in plain torch."""

import torch
from torch import Tensor

from headrace_kernels.kv_format import SMALLEST_SCALE
from headrace_kernels.reference import elementwise
from headrace_kernels.rounded import GROUP, LARGEST, Rounded, ScaledWeight, empty_rounded


def round_rows(x: Tensor, groups: bool) -> Rounded:
    """x [..., N], a scale for each 128 of N or for all of it."""
    out = empty_rounded(x.shape, x.device, groups=groups)
    rows = x.shape[:-1].numel()
    wide = x.reshape(rows, out.scale.shape[1], GROUP if groups else x.shape[-1]).float()
    scale = (wide.abs().amax(-1) / LARGEST).clamp_min(SMALLEST_SCALE)
    out.scale[:rows] = scale
    out.codes[:rows] = (wide / scale[..., None]).to(torch.float8_e4m3fn).view(rows, x.shape[-1])
    out.codes.view(torch.uint8)[rows:] = 0
    out.scale[rows:] = 0
    return out


def rounded_rms_norm(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, groups: bool
) -> tuple[Rounded, Tensor]:
    """The norm of x + residual, rounded, and this sum."""
    total = x if residual is None else x + residual
    return round_rows(elementwise.rms_norm(total, weight, eps), groups), total


def rounded_silu_mul(gate_up: Tensor, groups: bool) -> Rounded:
    """silu(first half) * second half, rounded."""
    return round_rows(elementwise.silu_mul(gate_up), groups)


def scaled_matmul(x: Rounded, weight: ScaledWeight, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The product of the values that codes and scales stand for."""
    values = weight.codes.float()
    if weight.in_blocks:
        scale = weight.scale[: values.shape[1] // GROUP].T
        values = values * scale.repeat_interleave(GROUP, 0).repeat_interleave(GROUP, 1)
    else:
        values = values * weight.scale
    out = x.float() @ values.T
    return (out if bias is None else out + bias.float()).to(dtype)

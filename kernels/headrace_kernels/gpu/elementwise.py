"""Launches norms, activation and rotary angles; torch for unsupported inputs."""

import torch
from torch import Tensor

from headrace_kernels.arguments import check_halves, check_norm
from headrace_kernels.gpu.kernels import elementwise as kernels
from headrace_kernels.gpu.tensors import FLOATS, flat, power_of_2, rows
from headrace_kernels.reference import elementwise as reference

_LARGEST_ROW = 32768  # a program holds whole rows in registers
_TILE = 1024


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    check_norm(x, weight)
    if not _norms(x, weight):
        return reference.rms_norm(x, weight, eps)
    return _normed(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    check_norm(x, weight)
    if not _norms(x, weight) or x.shape != residual.shape or x.dtype is not residual.dtype:
        return reference.add_rms_norm(x, residual, weight, eps)
    return _normed(x, residual, weight, eps)


def _norms(x: Tensor, weight: Tensor) -> bool:
    return x.dtype in FLOATS and weight.dtype in FLOATS and x.shape[-1] <= _LARGEST_ROW


def _normed(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    size = x.shape[-1]
    out = torch.empty(x.shape, dtype=torch.promote_types(x.dtype, weight.dtype), device=x.device)
    total = torch.empty(x.shape, dtype=x.dtype, device=x.device) if residual is not None else out
    count = out.numel() // size
    if count == 0:
        return out, total
    x = _two_levels(x)
    added = x if residual is None else _two_levels(residual.expand(out.shape))
    inner = x.shape[1]
    if added.shape != x.shape:
        x, added, inner = x.reshape(count, 1, size), added.reshape(count, 1, size), 1
    padded = power_of_2(size)
    tile = max(1, _TILE // padded)  # depends on the row's size alone, and so does the order of its sum
    warps = min(16, max(1 if padded < 512 else 4, padded // 1024))
    kernels.rms_norm[(-(-count // tile),)](
        out, total, x, added, weight.contiguous(), count, inner,
        x.stride(0), x.stride(1), added.stride(0), added.stride(1), eps,
        residual is not None, size, padded, tile, num_warps=warps, enable_fp_fusion=True,
    )  # fmt: skip
    return out, total


def _two_levels(x: Tensor) -> Tensor:
    """x as [A, B, N] with contiguous rows; heads of a merged projection stay views."""
    x = rows(x)
    if x.dim() == 3:
        return x.view(x.shape[1], 1, x.shape[2]) if x.shape[0] == 1 and x.stride(1) else x
    x = x.reshape(-1, x.shape[-1])
    return x[:, None]


def rope_angles(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    tokens, half = positions.shape[0], frequencies.shape[0]
    if frequencies.dtype is not torch.float32 or dtype not in FLOATS:
        return reference.rope_angles(positions, frequencies, factor, dtype)
    cos, sin = (torch.empty(tokens, 2 * half, dtype=dtype, device=positions.device) for _ in range(2))
    if tokens > 0:
        kernels.rope_angles[(tokens,)](
            cos, sin, positions, positions.stride(0), frequencies.contiguous(), factor, half, power_of_2(half),
            num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
    return cos, sin


def silu_mul(gate_up: Tensor) -> Tensor:
    check_halves(gate_up)
    if gate_up.dtype not in FLOATS:
        return reference.silu_mul(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    size = gate.shape[-1]
    if out.numel() == 0:
        return out
    gates, ups = flat(gate), flat(up)
    block = min(_TILE, power_of_2(size))
    kernels.silu_mul[(gates.shape[0], -(-size // block))](
        out, gates, ups, gates.stride(0), ups.stride(0), size, block, num_warps=4, enable_fp_fusion=True
    )
    return out

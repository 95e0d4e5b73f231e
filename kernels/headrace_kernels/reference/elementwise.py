"""Norms, activation and rotary embedding in plain torch; low-precision inputs are reduced in float32."""

import torch
from torch import Tensor
from torch.nn import functional


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``x / rms(x) * weight`` over the last dimension: x [..., N], weight [N]."""
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return normed.to(x.dtype) * weight


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The sum of both inputs [..., N], normalized and unchanged."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rope_angles(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin [T, R] of positions [T] times frequencies [R / 2] float32, twice side by side, times factor."""
    angles = positions[:, None].float() * frequencies
    angles = torch.cat((angles, angles), -1)
    return (angles.cos() * factor).to(dtype), (angles.sin() * factor).to(dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half of the last dimension: [..., 2 I] -> [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def gelu_mul(gate_up: Tensor) -> Tensor:
    """gelu(first half), by the tangent, * second half of the last dimension: [..., 2 I] -> [..., I]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.gelu(gate, approximate="tanh") * up


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x))."""
    return torch.sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x))."""
    return functional.softplus(x)


def apply_rope(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Rotates pairs (d, d + R/2) of the first R = cos.shape[-1] dimensions of each head."""
    return _rotate(query, cos[:, None], sin[:, None]), _rotate(key, cos[:, None], sin[:, None])


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    size = cos.shape[-1]
    rotated, rest = x[..., :size], x[..., size:]
    first, second = rotated.chunk(2, dim=-1)
    rotated = rotated * cos + torch.cat((-second, first), dim=-1) * sin
    return torch.cat((rotated, rest), dim=-1) if rest.shape[-1] else rotated

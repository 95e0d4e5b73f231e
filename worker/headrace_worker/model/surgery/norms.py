"""RMSNorm in one operation, also with a gate."""

import inspect

import torch
from torch import Tensor, nn

import headrace_kernels.ops as ops
from headrace_kernels.rounded import Rounded
from headrace_worker.model.surgery.verify import TOKENS, agrees, random_input


class FusedRmsNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    rounding: bool | None = None  # 8-bit rounding of the result: a scale for each group, or for each row; None: none

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor | Rounded:
        """hidden_states [..., N] -> [..., N]."""
        if self.rounding is not None:
            return ops.rounded_rms_norm(hidden_states, None, self.weight, self.eps, self.rounding)[0]
        return ops.rms_norm(hidden_states, self.weight, self.eps)

    def add(self, result: Tensor, residual: Tensor) -> tuple[Tensor | Rounded, Tensor]:
        """The norm of the sum of both [..., N], and the sum."""
        if self.rounding is not None:
            return ops.rounded_rms_norm(result, residual, self.weight, self.eps, self.rounding)
        return ops.add_rms_norm(result, residual, self.weight, self.eps)


class FusedGatedNorm(nn.Module):
    """A norm over groups of the last dimension, times silu(gate) before or after it."""

    def __init__(self, weight: Tensor, eps: float, group: int, gate_first: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps, self.group, self.gate_first = eps, group, gate_first
        self.variance_epsilon = eps  # a mixer's forward may read it

    def forward(self, hidden_states: Tensor, gate: Tensor) -> Tensor:
        """hidden_states, gate [..., N] -> [..., N]."""
        return ops.gated_rms_norm(hidden_states, gate, self.weight, self.eps, self.group, self.gate_first)


def fuse_norm(module: nn.Module) -> FusedRmsNorm | FusedGatedNorm | None:
    """The replacement of an RMSNorm of any family, or None."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "RMSNorm" not in type(module).__name__ or not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None
    if weight.dim() != 1 or next(module.children(), None) is not None:
        return None
    if "gate" in inspect.signature(module.forward).parameters:
        return _fuse_gated(module, weight.detach(), eps)
    x = random_input(weight, TOKENS, weight.shape[0])
    candidates = [weight.detach()]
    if weight.dtype == torch.float32:  # Gemma stores the scale minus one; in 16 bits the sum would be rounded
        candidates.append(weight.detach() + 1)
    for scale in candidates:
        fused = FusedRmsNorm(scale, eps)
        if agrees(lambda: module(x), lambda fused=fused: fused(x)):  # type: ignore[misc]
            return fused
    return None


def _fuse_gated(module: nn.Module, weight: Tensor, eps: float) -> FusedGatedNorm | None:
    """The replacement of a norm that gets a gate, or None."""
    size = weight.shape[0]
    x, gate = random_input(weight, 1, 2 * TOKENS, size).chunk(2, 1)
    group = getattr(module, "group_size", None) or size // getattr(module, "n_groups", 1)
    for gate_first in (True, False):
        fused = FusedGatedNorm(weight, eps, int(group), gate_first)
        if agrees(lambda: module(x, gate), lambda fused=fused: fused(x, gate)):  # type: ignore[misc]
            return fused
    return None

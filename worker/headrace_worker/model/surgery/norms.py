"""RMSNorm in one operation."""

import torch
from torch import Tensor, nn

import headrace_kernels.ops as ops
from headrace_worker.model.surgery.verify import TOKENS, agrees, random_input


class FusedRmsNorm(nn.Module):
    """x / rms(x) * weight over the last dimension."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.eps = eps

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [..., N] -> [..., N]."""
        return ops.rms_norm(hidden_states, self.weight, self.eps)


def fuse_norm(module: nn.Module) -> FusedRmsNorm | None:
    """The replacement of an RMSNorm of any family, or None."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if "RMSNorm" not in type(module).__name__ or not isinstance(weight, Tensor) or not isinstance(eps, float):
        return None
    if weight.dim() != 1 or next(module.children(), None) is not None:
        return None
    x = random_input(weight, TOKENS, weight.shape[0])
    candidates = [weight.detach()]
    if weight.dtype == torch.float32:  # Gemma stores the scale minus one; in 16 bits the sum would be rounded
        candidates.append(weight.detach() + 1)
    for scale in candidates:
        fused = FusedRmsNorm(scale, eps)
        if agrees(lambda: module(x), lambda fused=fused: fused(x)):  # type: ignore[misc]
            return fused
    return None

"""Linear layers: merged, and packed for the device."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headrace_kernels.invariant import InvariantLinear, is_invariant_already
from headrace_kernels.linear import PackedLinear
from headrace_proto.errors import ModelUnsupportedError


def merge_linears(parts: Sequence[nn.Module]) -> nn.Linear:
    """One linear whose outputs are those of `parts`, concatenated."""
    linears = [part for part in parts if isinstance(part, nn.Linear)]
    weight = torch.cat([part.weight for part in linears])
    biases = [part.bias for part in linears]
    merged = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    merged.weight = nn.Parameter(weight, requires_grad=False)
    if any(bias is not None for bias in biases):
        zeros = [part.weight.new_zeros(part.out_features) for part in linears]
        filled: list[Tensor] = [zero if bias is None else bias for bias, zero in zip(biases, zeros, strict=True)]
        merged.bias = nn.Parameter(torch.cat(filled), requires_grad=False)
    return merged


def pack_linear(module: nn.Module) -> PackedLinear | None:
    """A plain linear in the fastest form for its device, or None."""
    if type(module) is not nn.Linear:
        return None
    return PackedLinear(module.weight.detach(), None if module.bias is None else module.bias.detach())


def make_linear_invariant(module: nn.Module) -> PackedLinear | InvariantLinear | None:
    """A plain linear in a form whose rows do not depend on each other, or None."""
    if type(module) is not nn.Linear:
        return None
    if is_invariant_already(module.weight):
        return pack_linear(module)
    return InvariantLinear(module.weight.detach(), None if module.bias is None else module.bias.detach())


def check_invariant(model: nn.Module) -> None:
    """Raises ModelUnsupportedError when there is still a product whose rows may depend on their batch."""
    known = (PackedLinear, InvariantLinear, nn.Embedding)
    for name, module in model.named_modules():
        if not isinstance(module, known) and any(part.dim() > 1 for part in module.parameters(recurse=False)):
            raise ModelUnsupportedError(
                f"--deterministic does not cover {name} ({type(module).__name__}) of this model: serve it without."
            )

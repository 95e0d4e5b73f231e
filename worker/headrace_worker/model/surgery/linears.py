"""Linear layers: merged, and packed for a CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from headrace_base.errors import ModelUnsupportedError
from headrace_kernels.cpu import library
from headrace_kernels.invariant import InvariantLinear
from headrace_worker.model.packable import (
    LeftFactor,
    PackableLinear,
    PackedLinear,
    merge_packable,
    multiplies_by_weight,
)


def is_plain(module: nn.Module) -> bool:
    """Whether it is a linear as transformers has it, or one that will be packed."""
    return type(module) in (nn.Linear, PackableLinear)


def merge_linears(parts: Sequence[nn.Module]) -> nn.Linear:
    """One linear whose outputs are those of `parts`, concatenated."""
    linears = [part for part in parts if isinstance(part, nn.Linear)]
    packable = [part for part in linears if isinstance(part, PackableLinear)]
    if len(packable) == len(linears):
        return PackableLinear(merge_packable([part.matrix for part in packable]), _merged_bias(linears))
    weight = torch.cat(
        [part.matrix.dense(part.matrix.dtype) if isinstance(part, PackableLinear) else part.weight for part in linears]
    )
    return _linear(weight, _merged_bias(linears))


def take_outputs(linear: nn.Linear, order: Tensor) -> nn.Linear:
    """A linear with these outputs of another one, in this order."""
    bias = None if linear.bias is None else linear.bias[order]
    if not isinstance(linear, PackableLinear):
        return _linear(linear.weight[order.to(linear.weight.device)], bias)
    return PackableLinear(linear.matrix.take(order), bias)


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        linear.bias = nn.Parameter(bias, requires_grad=False)
    return linear


def _merged_bias(linears: Sequence[nn.Linear]) -> Tensor | None:
    if all(part.bias is None for part in linears):
        return None
    return torch.cat([part.weight.new_zeros(part.out_features) if part.bias is None else part.bias for part in linears])


def pack_linear(module: nn.Module, bf16: bool = False) -> PackedLinear | None:
    """A linear that can be packed, packed; or None. bf16: see `PackedLinear`."""
    return PackedLinear(module, bf16) if isinstance(module, PackableLinear) else None


def pack_left_factor(parent: nn.Module, name: str) -> LeftFactor | None:
    """A linear of which its module multiplies the weight by columns, packed; or None."""
    linear = parent.get_submodule(name)
    if type(linear) is not nn.Linear or not multiplies_by_weight(parent, name) or library.missing() is not None:
        return None
    return LeftFactor(linear) if linear.weight.is_cpu and linear.weight.dtype is torch.float32 else None


def make_linear_invariant(module: nn.Module, bf16: bool = False) -> PackedLinear | InvariantLinear | None:
    """A plain linear in a form whose rows do not depend on each other, or None. bf16: see `PackedLinear`."""
    if type(module) is not nn.Linear:
        return pack_linear(module, bf16)
    return InvariantLinear(module.weight.detach(), None if module.bias is None else module.bias.detach())


def check_invariant(model: nn.Module) -> None:
    """Raises ModelUnsupportedError when there is still a product whose rows may depend on their batch."""
    known = (PackedLinear, InvariantLinear, nn.Embedding)
    recurrent = {  # redirected to this package's operations, which read taps and decays; their products are linears
        id(part)
        for module in model.modules()
        if "forward" in vars(module)
        for part in (module, *(child for child in module.children() if isinstance(child, nn.Conv1d)))
    }
    for name, module in model.named_modules():
        if isinstance(module, known) or id(module) in recurrent:
            continue
        if any(part.dim() > 1 for part in module.parameters(recurse=False)):
            raise ModelUnsupportedError(
                f"--deterministic does not cover {name} ({type(module).__name__}) of this model: serve it without."
            )

"""Linears whose weights and inputs have 8 bits, on GPUs that multiply such numbers (W8A8).

Inputs are rounded to e4m3 as they come, with a scale for each token, or for each 128 of its entries where the weight is
in blocks: by the norm or the activation that makes them where a module's replacement calls it, else before the product.
"""

from torch import Tensor, nn

import headrace_kernels.ops as ops
from headrace_kernels.packed import Codes
from headrace_kernels.rounded import Products, Rounded, scaled_weight
from headrace_worker.model.packable import PackableLinear, PackableMatrix
from headrace_worker.model.surgery.layers import FusedLayer
from headrace_worker.model.surgery.mlp import FusedMlp


class ScaledLinear(nn.Module):
    """A linear with a weight in e4m3, whose inputs are rounded to that."""

    def __init__(self, matrix: PackableMatrix, bias: Tensor | None, products: Products) -> None:
        """Raises ValueError for a weight that has no such products."""
        super().__init__()
        codes = matrix.values
        scaled = scaled_weight(codes.codes, codes.scale) if isinstance(codes, Codes) else None
        if scaled is None or not (products.blocks if scaled.in_blocks else products.outputs):
            raise ValueError("no product of 8-bit numbers")
        self.scaled, self.dtype, self.names = scaled, matrix.dtype, matrix.rounding
        self.weight: Tensor | None = None
        self.register_buffer("bias", bias)

    @property
    def in_blocks(self) -> bool:
        return self.scaled.in_blocks

    def forward(self, x: Tensor | Rounded) -> Tensor:
        """x [..., in] -> [..., out]."""
        rounded = x if isinstance(x, Rounded) else ops.round_rows(x, self.in_blocks)
        bias = self.bias
        assert bias is None or isinstance(bias, Tensor)
        return ops.scaled_matmul(rounded, self.scaled, bias, self.dtype)

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        outputs, inputs = self.scaled.codes.shape
        return f"in_features={inputs}, out_features={outputs}, weight={'blocks' if self.in_blocks else 'outputs'}"


def scale_linear(module: nn.Module, products: Products) -> ScaledLinear | nn.Linear | None:
    """The replacement of a linear of codes: plain, with dequantized values, where the device has no product for it."""
    if not isinstance(module, PackableLinear) or not module.matrix.rounding:
        return None
    matrix, bias = module.matrix, None if module.bias is None else module.bias.detach()
    try:
        return ScaledLinear(matrix, bias, products)
    except ValueError:  # merged of matrices whose scales are of several kinds
        pass
    plain = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
    plain.weight = nn.Parameter(matrix.dense().to(matrix.dtype), requires_grad=False)
    plain.bias = module.bias
    return plain


def rounded_linears(model: nn.Module) -> dict[str, bool]:
    """The checkpoint's linears whose inputs are rounded: in groups, or with a scale for each token."""
    scaled = [module for module in model.modules() if isinstance(module, ScaledLinear)]
    return {name: module.in_blocks for module in scaled for name in module.names}


def round_in_place(model: nn.Module) -> int:
    """Norms and activations of fused layers round their results themselves where only such linears read them."""
    count = 0
    for layer in model.modules():
        down = layer.get_submodule(layer.down_name) if isinstance(layer, FusedMlp) and not layer.gelu else None
        if isinstance(layer, FusedMlp) and isinstance(down, ScaledLinear):
            layer.rounding, count = down.in_blocks, count + 1
        if not isinstance(layer, FusedLayer):
            continue
        qkv, attention, mlp = layer.self_attn.qkv_proj, layer.self_attn, layer.mlp
        if isinstance(qkv, ScaledLinear) and attention.g_proj is None:
            layer.first_norm.rounding, count = qkv.in_blocks, count + 1
        if isinstance(mlp, FusedMlp) and isinstance(mlp.gate_up_proj, ScaledLinear):
            layer.second_norm.rounding, count = mlp.gate_up_proj.in_blocks, count + 1
    return count

"""Linears whose weights stay codes on GPUs: products of 8-bit numbers (W8A8), or of few bits with 16 (W4A16, W8A16).

Inputs of W8A8 are rounded to e4m3 as they come, with a scale for each token, or for each 128 of its entries where the
weight is in blocks: by the norm or the activation that makes them where a module's replacement calls it, else before
the product.
"""

import torch
from torch import Tensor, nn

import headrace_kernels.ops as ops
from headrace_base.errors import ModelLoadError
from headrace_kernels.gpu import weight_only
from headrace_kernels.packed import Codes
from headrace_kernels.rounded import Products, Rounded, scaled_weight
from headrace_worker.model.packable import PackableLinear, PackableMatrix
from headrace_worker.model.surgery.layers import FusedLayer
from headrace_worker.model.surgery.mlp import FusedMlp
from headrace_worker.model.surgery.verify import TOKENS, agrees, random_input


class ScaledLinear(nn.Module):
    """A linear with a weight in e4m3, whose inputs are rounded to that."""

    def __init__(self, codes: Codes | Tensor, matrix: PackableMatrix, bias: Tensor | None, products: Products) -> None:
        """codes: of the matrix. Raises ValueError for a weight that has no such products."""
        super().__init__()
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


class WeightOnlyLinear(nn.Module):
    """A linear with a weight of few bits, and inputs in 16."""

    def __init__(self, codes: Codes, matrix: PackableMatrix, bias: Tensor | None) -> None:
        """codes: of the matrix."""
        super().__init__()
        self.few_bits = weight_only.few_bits(codes, matrix.form.bits, matrix.dtype, bias)
        self.order = matrix.order
        self.weight: Tensor | None = None
        self.dtype = matrix.dtype

    def forward(self, x: Tensor) -> Tensor:
        """x [..., in] -> [..., out]."""
        return weight_only.matmul(x if self.order is None else x.index_select(-1, self.order), self.few_bits)

    def extra_repr(self) -> str:
        """For ``print(model)``."""
        return f"in_features={self.few_bits.inputs}, out_features={self.few_bits.outputs}"


class OnGpu:
    """Replaces linears of codes: by plain ones, with dequantized values, where their device has no product for them."""

    def __init__(self, products: Products, few_bits: bool) -> None:
        self._products, self._few_bits = products, few_bits
        self._compared: set[object] = set()

    def __call__(self, module: nn.Module) -> ScaledLinear | WeightOnlyLinear | nn.Linear | None:
        if not isinstance(module, PackableLinear) or not module.matrix.on_gpu:
            return None
        matrix, bias = module.matrix, None if module.bias is None else module.bias.detach()
        codes = matrix.values
        if matrix.rounding:
            try:
                return ScaledLinear(codes, matrix, bias, self._products)
            except ValueError:  # merged of matrices whose scales are of several kinds
                pass
        if self._few_bits and isinstance(codes, Codes) and weight_only.can_multiply(codes):
            linear = WeightOnlyLinear(codes, matrix, bias)
            kind = (codes.shape, codes.group, codes.kind, codes.minimum is None, matrix.form)
            if kind not in self._compared:
                self._compared.add(kind)
                compare_product(module, linear, matrix.dtype)
            return linear
        return _plain(module)


def compare_product(linear: PackableLinear, replacement: nn.Module, dtype: torch.dtype) -> None:
    """Raises ModelLoadError unless both compute the same up to rounding: kernels are compiled for each shape."""
    x = random_input(torch.empty((), dtype=dtype, device=linear.matrix.device), TOKENS, linear.in_features)
    replacement(x)  # what it raises is shown
    if not agrees(lambda: linear(x), lambda: replacement(x)):
        raise ModelLoadError(
            f"humming-kernels {weight_only.REQUIRED} computes other values than torch here, for {linear.out_features} "
            f"outputs of {linear.in_features} inputs: uninstall it, and matrices are dequantized."
        )


def _plain(module: PackableLinear) -> nn.Linear:
    matrix = module.matrix
    plain = nn.Linear(module.in_features, module.out_features, bias=False, device="meta")
    plain.weight = nn.Parameter(matrix.dense(matrix.dtype), requires_grad=False)
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

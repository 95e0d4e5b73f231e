"""Runs of adjacent fused layers as one C++ call: no Python and no torch between their operations."""

import weakref
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from headrace_kernels.cpu.layers import Branch, LayerPool, Layers, LayerWeights, Norm, Product
from headrace_worker.model.attention import current_step
from headrace_worker.model.packable import PackedLinear
from headrace_worker.model.surgery.layers import FusedLayer
from headrace_worker.model.surgery.mlp import FusedMlp
from headrace_worker.model.surgery.norms import FusedRmsNorm


class NativeLayers(nn.Module):
    """Adjacent layers of one shape."""

    def __init__(self, layers: list[FusedLayer], weights: list[LayerWeights]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._indexes = [layer.self_attn.layer_idx for layer in layers]
        self.weights = tuple(weights)
        self._native = Layers(weights)
        self._bound: Callable[[], Tensor | None] = lambda: None  # the keys of the first layer

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        """hidden_states [1, T, N] -> [1, T, N]."""
        step = current_step()
        cos, sin = position_embeddings[0][0], position_embeddings[1][0]
        first = step.layers[self._indexes[0]].parts[0]
        if self._bound() is not first:
            caches = [step.layers[index] for index in self._indexes]
            pools = [(cache.pool, cache.window, cache.group) for cache in caches if cache.pool is not None]
            self._native.bind([LayerPool(*pool) for pool in pools])
            self._bound = weakref.ref(first)  # a model outlives its caches
        for index in self._indexes:
            step.attend_once(index)
        if step.written is None:
            return self._native(hidden_states, step.metas, cos, sin)[0]
        for place, index in enumerate(self._indexes):
            hidden_states, values = self._native(hidden_states, step.metas, cos, sin, only=place)
            step.written(index, values[0])
        return hidden_states


def native_weights(layer: FusedLayer) -> LayerWeights | None:
    """What C++ needs of a layer; None where it is not written for it."""
    attention, mlp = layer.self_attn, layer.mlp
    if not isinstance(mlp, FusedMlp):
        return None
    products = []
    for linear in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
        if not isinstance(linear, PackedLinear) or linear.order is not None:
            return None
        products.append(Product(linear.packed, linear.packed_bias(), linear.bf16))
    if not all(norm is None or isinstance(norm, FusedRmsNorm) for norm in (attention.q_norm, attention.k_norm)):
        return None
    query, key = (_norm(norm) for norm in (attention.q_norm, attention.k_norm))
    first, second = _norm(layer.first_norm), _norm(layer.second_norm)
    assert first is not None and second is not None
    weights = LayerWeights(
        first, products[0], query, key, products[1], second, products[2], products[3], attention.heads,
        attention.kv_heads, attention.head_dim, attention.scaling, attention.softcap, attention.sinks,
        Branch(_norm(layer.attention_norm), layer.factor), Branch(_norm(layer.mlp_norm), layer.factor), mlp.gelu,
    )  # fmt: skip
    return weights if weights.fits() else None


def _norm(norm: nn.Module | None) -> Norm | None:
    return Norm(norm.weight.detach(), norm.eps) if isinstance(norm, FusedRmsNorm) else None

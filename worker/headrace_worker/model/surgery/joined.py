"""Runs of adjacent layers as one module: in one C++ call where possible, else with additions inside the norms."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from headrace_kernels.cpu import library
from headrace_kernels.cpu.layers import LayerWeights
from headrace_worker.model.surgery.layers import FusedLayer, JoinedLayers, copy_attributes
from headrace_worker.model.surgery.native import NativeLayers, native_weights

_Run = list[tuple[FusedLayer, LayerWeights | None]]


@dataclass(slots=True)
class Joined:
    """How many decoder layers are called how."""

    native: int = 0
    joined: int = 0
    alone: int = 0

    def __str__(self) -> str:
        parts = {"in one C++ call": self.native, "joined": self.joined, "one by one": self.alone}
        return f"Layers: {', '.join(f'{count} {how}' for how, count in parts.items() if count) or 'one by one'}."


class _Passed(nn.Module):
    """In place of a layer that an earlier module computes."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        copy_attributes(original, self)

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        """The same hidden states."""
        return hidden_states


def join_layers(model: nn.Module, native: bool) -> Joined:
    """Replace each run of fused layers that get the same arguments. `native`: by C++ where it can compute them."""
    native = native and library.missing() is None
    found = Joined()
    for layers in [module for module in model.modules() if isinstance(module, nn.ModuleList)]:
        others = [
            layer for layer in layers if not isinstance(layer, FusedLayer) and any(True for _ in layer.parameters())
        ]
        found.alone += len(others) if any(isinstance(layer, FusedLayer) for layer in layers) else 0
        run: _Run = []
        for end in range(len(layers) + 1):
            layer = layers[end] if end < len(layers) else None
            weights = native_weights(layer) if native and isinstance(layer, FusedLayer) else None
            if run and not (isinstance(layer, FusedLayer) and _continues(model, run[-1], (layer, weights))):
                _replace(layers, end - len(run), run, found)
                run = []
            if isinstance(layer, FusedLayer):
                run.append((layer, weights))
    return found


def _replace(layers: nn.ModuleList, start: int, run: _Run, found: Joined) -> None:
    own = [layer for layer, _ in run]
    weights = [each for _, each in run if each is not None]
    if weights:
        found.native += len(run)
        one: nn.Module = NativeLayers(own, weights)
    elif len(run) > 1:
        found.joined += len(run)
        one = JoinedLayers(own)
    else:
        found.alone += 1
        return
    copy_attributes(own[0], one)
    for place in range(start, start + len(run)):
        layers[place] = _Passed(layers[place])
    layers[start] = one.eval()
    if len(run) == len(layers):
        del layers[1:]  # a model's forward calls what is there


def _continues(
    model: nn.Module, last: tuple[FusedLayer, LayerWeights | None], new: tuple[FusedLayer, LayerWeights | None]
) -> bool:
    """Whether a layer gets the same arguments as the one before, and has its shape where that matters."""

    def of(one: LayerWeights | None) -> tuple[int, ...] | None:
        if one is None:
            return None
        parts = (one.qkv, one.out, one.gate_up, one.down)
        return (one.heads, one.kv_heads, one.head_dim, *(n for p in parts for n in (p.weight.outputs, p.weight.inputs)))

    return _kind(model, last[0]) == _kind(model, new[0]) and of(last[1]) == of(new[1])


def _kind(model: nn.Module, layer: FusedLayer) -> object:
    """What a model's forward may choose a layer's arguments by."""
    types = getattr(getattr(model, "config", None), "layer_types", None)
    own = types[layer.self_attn.layer_idx] if types else None
    return own, getattr(layer, "attention_type", None), getattr(layer, "layer_type", None)

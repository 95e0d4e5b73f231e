"""Pre-norm decoder layers with the residual additions inside the norms."""

from typing import Any

from torch import Tensor, nn

from headrace_kernels.rounded import Rounded
from headrace_worker.model.surgery.norms import FusedRmsNorm
from headrace_worker.model.surgery.self_attention import FusedAttention
from headrace_worker.model.surgery.verify import TOKENS, TinyStep, agrees, random_input

# The names of a layer's norms: before attention, of its result, before the MLP, of its result.
_NORMS = (
    ("input_layernorm", None, "post_attention_layernorm", None),
    ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    ("input_layernorm", "post_self_attn_layernorm", "post_attention_layernorm", "post_mlp_layernorm"),
)


def copy_attributes(original: nn.Module, to: nn.Module) -> None:
    """A model's forward may read plain attributes of its layers, such as their attention type."""
    for name, value in vars(original).items():
        if not name.startswith("_") and name != "training":
            setattr(to, name, value)


class FusedLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)); both results may have a norm and a factor."""

    def __init__(self, original: nn.Module, attention: FusedAttention, norms: tuple[FusedRmsNorm | None, ...]) -> None:
        super().__init__()
        copy_attributes(original, self)
        first, self.attention_norm, second, self.mlp_norm = norms
        assert first is not None and second is not None
        self.first_norm, self.second_norm = first, second
        self.factor = float(getattr(original, "residual_multiplier", 1.0))
        self.self_attn = attention
        self.mlp = original.get_submodule("mlp")

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        """hidden_states [1, T, N] -> [1, T, N]."""
        result, residual = self.branches(self.first_norm(hidden_states), hidden_states, position_embeddings)
        return residual + result

    def branches(
        self, normed: Tensor | Rounded, residual: Tensor, position_embeddings: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """normed: of residual, both [1, T, N] -> (the result of the MLP, what it is to be added to)."""
        attended, _weights = self.self_attn(normed, position_embeddings)
        attended = self._branch(attended, self.attention_norm)
        normed, residual = self.second_norm.add(attended, residual)
        return self._branch(self.mlp(normed), self.mlp_norm), residual

    def _branch(self, result: Tensor, norm: FusedRmsNorm | None) -> Tensor:
        if norm is not None:
            result = norm(result)
        return result if self.factor == 1.0 else result * self.factor


class JoinedLayers(nn.Module):
    """Adjacent layers that get the same arguments: the first norm of each adds the result of the one before."""

    def __init__(self, layers: list[FusedLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        """hidden_states [1, T, N] -> [1, T, N]."""
        result, residual = None, hidden_states
        for layer in self.layers:
            assert isinstance(layer, FusedLayer)
            norm = layer.first_norm
            if result is None:
                normed: Tensor | Rounded = norm(residual)
            else:
                normed, residual = norm.add(result, residual)
            result, residual = layer.branches(normed, residual, position_embeddings)
        assert result is not None
        return residual + result


def fuse_layer(module: nn.Module, window: int, verify: bool) -> FusedLayer | None:
    """The replacement of a decoder layer whose norms and attention are fused already, or None."""
    children = {name: child for name, child in module.named_children() if not isinstance(child, nn.Dropout)}
    for names in _NORMS:
        if set(children) == {"self_attn", "mlp", *(name for name in names if name is not None)}:
            break
    else:
        return None
    norms = tuple(None if name is None else children[name] for name in names)
    attention = children["self_attn"]
    if not isinstance(attention, FusedAttention) or not isinstance(norms[0], FusedRmsNorm):
        return None
    fused_norms = tuple(norm if isinstance(norm, FusedRmsNorm) else None for norm in norms)
    if fused_norms != norms:
        return None
    fused = FusedLayer(module, attention, fused_norms)
    if verify:
        weight = norms[0].weight
        x = random_input(weight, 1, TOKENS, weight.shape[0])
        step = TinyStep(attention.layer_idx, attention.kv_heads, attention.head_dim, window, weight)
        if not agrees(lambda: step.run(module, x), lambda: step.run(fused, x)):
            return None
    return fused

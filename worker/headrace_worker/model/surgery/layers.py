"""A pre-norm decoder layer with the residual addition inside the second norm."""

from typing import Any

from torch import Tensor, nn

import headrace_kernels.ops as ops
from headrace_worker.model.surgery.norms import FusedRmsNorm
from headrace_worker.model.surgery.self_attention import FusedAttention
from headrace_worker.model.surgery.verify import TOKENS, TinyStep, agrees, random_input

_CHILDREN = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}


class FusedLayer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self, original: nn.Module, first: FusedRmsNorm, attention: FusedAttention, second: FusedRmsNorm
    ) -> None:
        super().__init__()
        for name, value in vars(original).items():
            # A model's forward may read plain attributes of its layers, such as their attention type.
            if not name.startswith("_") and name != "training":
                setattr(self, name, value)
        self.input_layernorm = first
        self.self_attn = attention
        self.post_attention_layernorm = second
        self.mlp = original.get_submodule("mlp")

    def forward(self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], **_: Any) -> Tensor:
        """hidden_states [1, T, N] -> [1, T, N]."""
        attended, _weights = self.self_attn(self.input_layernorm(hidden_states), position_embeddings)
        norm = self.post_attention_layernorm
        normed, residual = ops.add_rms_norm(attended, hidden_states, norm.weight, norm.eps)
        out: Tensor = residual + self.mlp(normed)
        return out


def fuse_layer(module: nn.Module, window: int, verify: bool) -> FusedLayer | None:
    """The replacement of a decoder layer whose norms and attention are fused already, or None."""
    if {name for name, _ in module.named_children()} != _CHILDREN:
        return None
    first, second = module.get_submodule("input_layernorm"), module.get_submodule("post_attention_layernorm")
    attention = module.get_submodule("self_attn")
    if not (isinstance(first, FusedRmsNorm) and isinstance(second, FusedRmsNorm)):
        return None
    if not isinstance(attention, FusedAttention):
        return None
    fused = FusedLayer(module, first, attention, second)
    if verify:
        x = random_input(first.weight, 1, TOKENS, first.weight.shape[0])
        step = TinyStep(attention.layer_idx, attention.kv_heads, attention.head_dim, window, first.weight)
        if not agrees(lambda: step.run(module, x), lambda: step.run(fused, x)):
            return None
    return fused

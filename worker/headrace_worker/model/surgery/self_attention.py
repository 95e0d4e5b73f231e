"""Self-attention with q/k/v in one product, rotary embedding and KV write in one operation, and no [1, H, T, D].

Shape letters: T tokens, H query heads, K key/value heads, D head size, N hidden size.
"""

from typing import Any

import torch
from torch import Tensor, nn

import headrace_kernels.ops as ops
from headrace_kernels.meta import HeadNorms
from headrace_kernels.rounded import Rounded
from headrace_worker.model.attention import attend
from headrace_worker.model.surgery.linears import is_plain, merge_linears, take_outputs
from headrace_worker.model.surgery.norms import FusedRmsNorm
from headrace_worker.model.surgery.verify import TOKENS, TinyStep, agrees, random_input

_PARTS = {"q_proj", "k_proj", "v_proj", "o_proj"}
_MERGED = {"qkv_proj", "o_proj"}
_BESIDE = {"q_norm", "k_norm", "g_proj"}  # where a family has them


class FusedAttention(nn.Module):
    """Causal self-attention over the paged cache, in the form of most families.

    gated: the output is multiplied by the sigmoid of a gate; the original has each head's gate after its query. Or of
    one number for each head, the product g_proj.
    """

    def __init__(self, original: nn.Module, heads: int, kv_heads: int, head_dim: int, gated: bool = False) -> None:
        super().__init__()
        part = original.get_submodule
        self.layer_idx = int(original.layer_idx)  # type: ignore[arg-type]
        self.heads, self.kv_heads, self.head_dim, self.gated = heads, kv_heads, head_dim, gated
        self.scaling = float(original.scaling)  # type: ignore[arg-type]
        self.softcap = float(getattr(original, "attn_logit_softcapping", None) or 0.0)
        self.sinks: Tensor | None = getattr(original, "sinks", None)
        merged = hasattr(original, "qkv_proj")
        parts = [part("q_proj"), part("k_proj"), part("v_proj")] if not merged else []
        if gated:
            both = parts[0]
            assert isinstance(both, nn.Linear)
            rows = torch.arange(both.out_features).view(heads, 2, head_dim)
            parts[0] = take_outputs(both, rows[:, 0].flatten())
            parts.append(take_outputs(both, rows[:, 1].flatten()))
        self.qkv_proj: nn.Module = part("qkv_proj") if merged else merge_linears(parts)
        self.o_proj = part("o_proj")
        self.q_norm = part("q_norm") if hasattr(original, "q_norm") else None
        self.k_norm = part("k_norm") if hasattr(original, "k_norm") else None
        self.g_proj = part("g_proj") if getattr(original, "g_proj", None) is not None else None

    def forward(
        self, hidden_states: Tensor | Rounded, position_embeddings: tuple[Tensor, Tensor] | None, **_: Any
    ) -> tuple[Tensor, None]:
        """hidden_states [1, T, N], position_embeddings two of [1, T, D], None without -> [1, T, N]."""
        tokens = hidden_states.shape[1]
        gates = self.heads if self.gated else 0
        heads = self.qkv_proj(hidden_states).view(tokens, self.heads + 2 * self.kv_heads + gates, self.head_dim)
        query, key, value, gate = heads.split((self.heads, self.kv_heads, self.kv_heads, gates), 1)
        rope = None if position_embeddings is None else (position_embeddings[0][0], position_embeddings[1][0])
        norms = None if rope is None else self._norms()
        if norms is None and self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        out = attend(
            self.layer_idx, query, key, value, scale=self.scaling, softcap=self.softcap, sinks=self.sinks, rope=rope,
            norms=norms,
        )  # fmt: skip
        if self.g_proj is not None:
            assert isinstance(hidden_states, Tensor)
            out = out.view(tokens, self.heads, self.head_dim) * ops.sigmoid(self.g_proj(hidden_states[0]))[:, :, None]
        out = out.view(1, tokens, self.heads * self.head_dim)
        if self.gated:
            out = out * ops.sigmoid(gate.flatten(1))
        return self.o_proj(out), None

    def _norms(self) -> HeadNorms | None:
        """The norms of queries and keys, if they can be computed with the rotation."""
        query, key = self.q_norm, self.k_norm
        if not isinstance(query, FusedRmsNorm) or not isinstance(key, FusedRmsNorm) or query.eps != key.eps:
            return None
        return HeadNorms(query.weight, key.weight, query.eps)


def fuse_attention(module: nn.Module, window: int, verify: bool) -> FusedAttention | None:
    """The replacement of a self-attention module whose layer attends to `window` tokens (0 = all), or None."""
    names = {name for name, _ in module.named_children()}
    products = names - _BESIDE
    if products not in (_PARTS, _MERGED) or not hasattr(module, "layer_idx"):
        return None
    linears = [module.get_submodule(name) for name in sorted(products)]
    head_dim = getattr(module, "head_dim", None)
    if not all(map(is_plain, linears)) or not isinstance(head_dim, int):
        return None
    if not isinstance(getattr(module, "scaling", None), float):
        return None
    out, first = module.get_submodule("o_proj"), linears[-1]
    assert isinstance(out, nn.Linear) and isinstance(first, nn.Linear)
    rows = sum(linear.out_features for linear in linears if isinstance(linear, nn.Linear)) - out.out_features
    heads = out.in_features // head_dim
    query = getattr(module, "q_proj", None)
    gated = isinstance(query, nn.Linear) and query.out_features == 2 * out.in_features
    rows -= out.in_features if gated else 0
    kv_heads = (rows // head_dim - heads) // 2
    if kv_heads < 1 or (heads + 2 * kv_heads) * head_dim != rows or heads * head_dim != out.in_features:
        return None
    fused = FusedAttention(module, heads, kv_heads, head_dim, gated)
    if verify:
        x = random_input(first.weight, 1, TOKENS, first.in_features)
        step = TinyStep(fused.layer_idx, kv_heads, head_dim, window, first.weight)
        if not agrees(lambda: step.run(module, x), lambda: step.run(fused, x)):
            return None
    return fused

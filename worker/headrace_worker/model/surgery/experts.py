"""Mixtures of experts on CPUs: each expert a gated MLP of packed products; routers with the same bits in any batch.

Shape letters: T tokens, N hidden size, X experts, A of them that are active for a token, M inner size of one.
"""

from typing import Any

import torch
from torch import Tensor, nn

import headrace_kernels.ops as ops
from headrace_kernels.packed import Form
from headrace_worker.model.packable import PackableLinear, PackableMatrix
from headrace_worker.model.surgery.mlp import FusedMlp, activation
from headrace_worker.model.surgery.verify import TOKENS, agrees, random_input

# Forms of experts that transformers marks, of those that its version knows.
_OTHER_FORMS = ("is_transposed", "has_bias", "has_post_expert_norm")


class FusedExperts(nn.Module):
    """The experts of transformers' interface, one after another, each over its tokens."""

    def __init__(self, experts: list[FusedMlp]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, N], experts and their weights [T, A] -> [T, N]. The expert X is none."""
        tokens, active = top_k_index.shape
        order = top_k_index.flatten().argsort(stable=True)
        counts = top_k_index.flatten().bincount(minlength=len(self.experts) + 1)
        out = hidden_states.new_zeros(tokens * active, hidden_states.shape[1])
        for expert, rows in zip(self.experts, torch.split(order, counts.tolist()), strict=False):
            if len(rows):
                out[rows] = expert(hidden_states[rows // active])
        parts = (out.view(tokens, active, -1) * top_k_weights[:, :, None]).unbind(1)
        return _sum(parts).to(hidden_states.dtype)


class FusedRouter(nn.Module):
    """The most probable experts of a token by softmax. normalized: their weights have the sum 1."""

    def __init__(self, proj: nn.Module, active: int, normalized: bool) -> None:
        super().__init__()
        self.proj = proj
        self.active, self.normalized = active, normalized

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """hidden_states [..., N] -> scores [T, X], weights and experts [T, A]."""
        scores = self.proj(hidden_states.flatten(0, -2))
        weights, index = scores.softmax(-1).topk(self.active, dim=-1)
        if self.normalized:
            weights = weights / _sum(weights.unbind(1))[:, None]
        return scores, weights, index


class FusedSharedMoe(nn.Module):
    """Routed experts, and a shared one times the sigmoid of its gate."""

    def __init__(self, original: nn.Module) -> None:
        super().__init__()
        part = original.get_submodule
        self.gate, self.experts = part("gate"), part("experts")
        self.shared_expert, self.shared_expert_gate = part("shared_expert"), part("shared_expert_gate")

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [..., N] -> [..., N]."""
        rows = hidden_states.flatten(0, -2)
        _scores, weights, index = self.gate(rows)
        shared = ops.sigmoid(self.shared_expert_gate(rows)) * self.shared_expert(rows)
        out: Tensor = self.experts(rows, index, weights) + shared
        return out.view(hidden_states.shape)


def _sum(parts: tuple[Tensor, ...]) -> Tensor:
    """In their order: that of torch's sum depends on the shape."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def fuse_experts(module: nn.Module, _window: int, verify: bool) -> FusedExperts | FusedRouter | None:
    """The replacement of experts, or of a router, or None."""
    if "TopKRouter" in type(module).__name__:
        return _fuse_router(module)
    is_usual = getattr(module, "is_concatenated", False) and getattr(module, "has_gate", False)
    if not is_usual or any(getattr(module, name, False) for name in _OTHER_FORMS):
        return None
    return _fuse_experts(module, verify)


def fuse_shared_experts(module: nn.Module, _window: int, verify: bool) -> FusedSharedMoe | None:
    """The replacement of a block with a shared expert whose other experts are fused, or None."""
    names = {name for name, _ in module.named_children()}
    if names != {"gate", "experts", "shared_expert", "shared_expert_gate"}:
        return None
    linear, experts = module.get_submodule("shared_expert_gate"), module.get_submodule("experts")
    if not isinstance(experts, FusedExperts) or not isinstance(linear, nn.Linear):
        return None
    fused = FusedSharedMoe(module)
    if verify:
        x = random_input(linear.weight, 1, TOKENS, linear.in_features)
        if not agrees(lambda: module(x), lambda: fused(x)):
            return None
    return fused


def _fuse_experts(module: Any, verify: bool) -> FusedExperts | None:
    gelu = activation(module)
    up, down = module.gate_up_proj, module.down_proj
    if gelu is None or not _can_be_packed(up):
        return None
    fused = FusedExperts([FusedMlp(_packable(up[i]), _packable(down[i]), gelu) for i in range(len(up))])
    if verify:
        x = random_input(up, TOKENS, up.shape[2])
        weights, index = random_input(up, TOKENS, len(up)).topk(min(2, len(up)))
        if not agrees(lambda: module(x, index, weights), lambda: fused(x, index, weights)):
            return None
    return fused


def _fuse_router(module: Any) -> FusedRouter | None:
    weight, active = getattr(module, "weight", None), getattr(module, "top_k", None)
    extra = [name for name, _ in [*module.named_parameters(), *module.named_buffers()] if name != "weight"]
    if extra or not isinstance(active, int) or not isinstance(weight, Tensor) or not _can_be_packed(weight):
        return None
    x = random_input(weight, TOKENS, weight.shape[1])

    def weights(router: nn.Module) -> Tensor:
        _scores, values, index = router(x)
        return x.new_zeros(TOKENS, len(weight)).scatter(1, index, values)

    for normalized in (False, True):
        fused = FusedRouter(_packable(weight), active, normalized)
        if agrees(lambda: weights(module), lambda fused=fused: weights(fused)):  # type: ignore[misc]
            return fused
    return None


def _can_be_packed(weight: Tensor) -> bool:
    return weight.is_cpu and weight.dtype is torch.float32


def _packable(weight: Tensor) -> PackableLinear:
    """In bfloat16 if that has all of its values: products are the same, bit for bit."""
    small = weight.detach().to(torch.bfloat16)
    if weight.shape[1] % 8 == 0 and torch.equal(small.float(), weight):
        return PackableLinear(PackableMatrix(small, Form.BFLOAT16), None)
    return PackableLinear(PackableMatrix(weight.detach(), Form.FLOAT32), None)

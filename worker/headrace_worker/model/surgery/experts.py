"""Mixtures of experts on CPUs: each expert an MLP of packed products; routers with the same bits in any batch.

Shape letters: T tokens, N hidden size, X experts, A of them that are active for a token, M inner size of one.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import headrace_kernels.ops as ops
from headrace_kernels.packed import Form
from headrace_proto.errors import ModelUnsupportedError
from headrace_worker.model.packable import PackableLinear, PackableMatrix, is_experts
from headrace_worker.model.surgery.mlp import FusedMlp, activation
from headrace_worker.model.surgery.verify import TOKENS, agrees, random_input

_VERIFIED = 2  # experts of a module, whose products are compared


class OwnMlp(nn.Module):
    """An expert whose activation is its family's own: down(activate(up))."""

    def __init__(self, up: nn.Module, down: nn.Module, activate: Callable[[Tensor], Tensor]) -> None:
        """activate: [..., outputs of up] -> [..., M]."""
        super().__init__()
        self.up_proj, self.down_proj = up, down
        self._activate = activate

    def forward(self, hidden_states: Tensor) -> Tensor:
        """hidden_states [..., N] -> [..., N]."""
        out: Tensor = self.down_proj(self._activate(self.up_proj(hidden_states)))
        return out


class FusedExperts(nn.Module):
    """The experts of transformers' interface, one after another, each over its tokens."""

    def __init__(self, experts: list[nn.Module]) -> None:
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
    return _fuse_experts(module, verify) if is_experts(module) else None


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
    up_name = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
    codes = getattr(module, "packable_experts", {})
    dense = [getattr(module, name, None) for name in (up_name, "down_proj") if name not in codes]
    if not all(isinstance(weight, Tensor) and _can_be_packed(weight) for weight in dense):
        return None
    ups, downs = _linears(module, up_name), _linears(module, "down_proj")
    gelu = activation(module)
    # Not the family's own gate, which may clamp.
    gate = getattr(getattr(type(module), "_apply_gate", None), "__name__", "")
    usual = gate == "_default_apply_gate" and up_name == "gate_up_proj"
    post_norm = getattr(module, "has_post_expert_norm", False)
    experts: list[nn.Module] = []
    activate = _activation_of(module)
    for up, down in zip(ups, downs, strict=True):
        plain = usual and gelu is not None and getattr(module, "is_concatenated", True)
        expert = FusedMlp(up, down, bool(gelu)) if plain else OwnMlp(up, down, activate)
        experts.append(nn.Sequential(expert, module.post_expert_norm) if post_norm else expert)
    if verify and not _computes_the_same(module, up_name, ups, downs, experts[:_VERIFIED]):
        return None
    return FusedExperts(experts)


def check_experts(model: nn.Module) -> None:
    """Raises ModelUnsupportedError if experts whose weights are codes were not replaced: they have no values."""
    for module in model.modules():
        if "packable_experts" in vars(module):
            raise ModelUnsupportedError(
                f"{type(module).__name__} computes its experts in a way that is not known, so this checkpoint's "
                "codes cannot be multiplied: give unquantized safetensors."
            )


def _linears(module: Any, name: str) -> list[PackableLinear]:
    """A linear for each expert, with its bias."""
    bias = getattr(module, f"{name}_bias", None) if getattr(module, "has_bias", False) else None
    codes = getattr(module, "packable_experts", {}).get(name)
    if codes is None:
        stack = module.get_parameter(name).detach()
        codes = [_packable(one.T if getattr(module, "is_transposed", False) else one) for one in stack]
    return [PackableLinear(one, None if bias is None else bias[i].detach()) for i, one in enumerate(codes)]


def _activation_of(module: Any) -> Callable[[Tensor], Tensor]:
    """The gate or activation of a module, without its weights."""
    without = copy.copy(module)
    without.__dict__ = {key: value for key, value in vars(module).items() if key != "packable_experts"}
    without._parameters = {}
    activate: Callable[[Tensor], Tensor] = without._apply_gate if getattr(module, "has_gate", True) else module.act_fn
    return activate


def _computes_the_same(
    module: Any, up_name: str, ups: list[PackableLinear], downs: list[PackableLinear], experts: list[nn.Module]
) -> bool:
    """Compares the first experts with the module's own forward."""
    few = copy.copy(module)
    few.num_experts = len(experts)
    few._parameters = dict(module._parameters)
    for name, linears in ((up_name, ups), ("down_proj", downs)):
        stack = torch.stack([one.matrix.dense() for one in linears[: len(experts)]])
        stack = stack.transpose(1, 2) if getattr(module, "is_transposed", False) else stack
        few._parameters[name] = nn.Parameter(stack, requires_grad=False)
    x = random_input(stack, TOKENS, ups[0].in_features)
    weights, index = random_input(stack, TOKENS, len(experts)).topk(len(experts))
    fused = FusedExperts(experts)
    return agrees(lambda: few(x, index, weights), lambda: fused(x, index, weights))


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
        fused = FusedRouter(PackableLinear(_packable(weight), None), active, normalized)
        if agrees(lambda: weights(module), lambda fused=fused: weights(fused)):  # type: ignore[misc]
            return fused
    return None


def _can_be_packed(weight: Tensor) -> bool:
    return weight.is_cpu and weight.dtype is torch.float32


def _packable(weight: Tensor) -> PackableMatrix:
    """In bfloat16 if that has all of its values: products are the same, bit for bit."""
    small = weight.detach().to(torch.bfloat16)
    if weight.shape[1] % 8 == 0 and torch.equal(small.float(), weight):
        return PackableMatrix(small, Form.BFLOAT16)
    return PackableMatrix(weight.detach(), Form.FLOAT32)

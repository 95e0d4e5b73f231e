"""Mixtures of experts. On CPUs each is an MLP of packed products, and routers have the same bits in any batch; on GPUs
experts whose weights are codes are two products for all.

Shape letters: T tokens, N hidden size, X experts, A of them that are active for a token, M inner size of one.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import headrace_kernels.ops as ops
from headrace_base.errors import ModelUnsupportedError
from headrace_kernels.gpu import weight_only
from headrace_kernels.packed import Codes, Form, stack
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


class ExpertsOnGpu(nn.Module):
    """The experts of transformers' interface, of codes: two products, each of all experts, over rows in their order."""

    def __init__(
        self,
        ups: list[PackableLinear],
        downs: list[PackableLinear],
        activate: Callable[[Tensor], Tensor],
        post_norm: nn.Module | None,
    ) -> None:
        super().__init__()
        self.up, self.down = (_few_bits(linears) for linears in (ups, downs))
        self.count, self._activate, self.post_norm = len(ups), activate, post_norm

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """hidden_states [T, N], experts and their weights [T, A] -> [T, N]. The expert X is none. Shapes depend on the
        inputs' shapes alone, so that it can be recorded.
        """
        tokens, active = top_k_index.shape
        chosen, order = top_k_index.flatten().sort(stable=True)
        offsets = torch.searchsorted(chosen, torch.arange(self.count + 1, device=chosen.device, dtype=chosen.dtype))
        rows = weight_only.matmul(hidden_states[order // active], self.up, offsets)
        rows = weight_only.matmul(self._activate(rows), self.down, offsets)
        rows = rows if self.post_norm is None else self.post_norm(rows)
        # Rows of experts on other ranks were not computed, and may be NaN.
        rows = torch.where((chosen < self.count)[:, None], rows, 0)
        out = torch.empty_like(rows)
        out[order] = rows
        return (out.view(tokens, active, -1) * top_k_weights[:, :, None]).sum(1).to(hidden_states.dtype)


def _few_bits(linears: list[PackableLinear]) -> weight_only.FewBits:
    """The weights of all experts, which are codes on a GPU."""
    matrix = linears[0].matrix
    codes = stack([values for linear in linears if isinstance(values := linear.matrix.values, Codes)])
    biases = [linear.bias.detach() for linear in linears if linear.bias is not None]
    return weight_only.few_bits(codes, matrix.form.bits, matrix.dtype, torch.stack(biases) if biases else None)


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


def put_experts_on_gpu(module: nn.Module, _window: int, verify: bool) -> ExpertsOnGpu | None:
    """The replacement of experts whose weights are codes on a GPU, or None."""
    codes = getattr(module, "packable_experts", {})
    if not is_experts(module) or not all(one.on_gpu for matrices in codes.values() for one in matrices):
        return None
    up_name = _up_name(module)
    if set(codes) != {up_name, "down_proj"}:
        return None
    ups, downs = _linears(module, up_name), _linears(module, "down_proj")
    post_norm = module.get_submodule("post_expert_norm") if getattr(module, "has_post_expert_norm", False) else None
    gelu = _usual_activation(module)
    activate = _activation_of(module) if gelu is None else ops.gelu_mul if gelu else ops.silu_mul
    experts = ExpertsOnGpu(ups, downs, activate, post_norm)
    return None if verify and not _computes_the_same(module, ups, downs, experts) else experts


def _fuse_experts(module: Any, verify: bool) -> FusedExperts | None:
    up_name = _up_name(module)
    codes = getattr(module, "packable_experts", {})
    dense = [getattr(module, name, None) for name in (up_name, "down_proj") if name not in codes]
    if not all(isinstance(weight, Tensor) and _can_be_packed(weight) for weight in dense):
        return None
    ups, downs = _linears(module, up_name), _linears(module, "down_proj")
    gelu = _usual_activation(module)
    post_norm = getattr(module, "has_post_expert_norm", False)
    experts: list[nn.Module] = []
    activate = _activation_of(module)
    for up, down in zip(ups, downs, strict=True):
        expert = OwnMlp(up, down, activate) if gelu is None else FusedMlp(up, down, gelu)
        experts.append(nn.Sequential(expert, module.post_expert_norm) if post_norm else expert)
    fused = FusedExperts(experts)
    return None if verify and not _computes_the_same(module, ups, downs, fused) else fused


def _up_name(module: Any) -> str:
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"


def _usual_activation(module: Any) -> bool | None:
    """Whether gates are GELU by the tangent, or SiLU, times the other half; None if it is the family's own, which may
    clamp.
    """
    gate = getattr(getattr(type(module), "_apply_gate", None), "__name__", "")
    usual = gate == "_default_apply_gate" and _up_name(module) == "gate_up_proj"
    return activation(module) if usual and getattr(module, "is_concatenated", True) else None


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


def _computes_the_same(module: Any, ups: list[PackableLinear], downs: list[PackableLinear], fused: nn.Module) -> bool:
    """Compares the first experts with the module's own forward."""
    few = copy.copy(module)
    few.num_experts = count = min(_VERIFIED, len(ups))
    few._parameters = dict(module._parameters)
    for name, linears in ((_up_name(module), ups), ("down_proj", downs)):
        stacked = torch.stack([one.matrix.dense(one.matrix.dtype) for one in linears[:count]])
        stacked = stacked.transpose(1, 2) if getattr(module, "is_transposed", False) else stacked
        few._parameters[name] = nn.Parameter(stacked, requires_grad=False)
    x = random_input(stacked, TOKENS, ups[0].in_features)
    weights, index = random_input(stacked, TOKENS, count).topk(count)
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

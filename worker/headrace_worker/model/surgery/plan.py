"""Which changes are applied, in which order, and a note of the result."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace_kernels.cpu import library
from headrace_kernels.rounded import NO_PRODUCTS, Products
from headrace_worker.model.cache_layout import layer_windows
from headrace_worker.model.packable import reads_weight
from headrace_worker.model.surgery.experts import check_experts, fuse_experts, fuse_shared_experts, put_experts_on_gpu
from headrace_worker.model.surgery.layers import fuse_layer
from headrace_worker.model.surgery.linears import check_invariant, make_linear_invariant, pack_left_factor, pack_linear
from headrace_worker.model.surgery.mlp import fuse_mlp
from headrace_worker.model.surgery.norms import fuse_norm
from headrace_worker.model.surgery.recurrent import fuse_delta_net
from headrace_worker.model.surgery.rotary import fuse_rotary
from headrace_worker.model.surgery.scaled import OnGpu, round_in_place
from headrace_worker.model.surgery.self_attention import fuse_attention


@dataclass(frozen=True, slots=True)
class SurgeryPlan:
    """Each piece can be disabled; `SurgeryPlan.none()` leaves the model as transformers built it."""

    norms: bool = True
    attention: bool = True
    mlp: bool = True
    layers: bool = True  # needs norms and attention
    linears: bool = True
    joined: bool = True  # needs layers
    native: bool = True  # by C++ where it can compute them; needs linears
    bf16: bool = False  # inputs of products with packed weights are rounded to bfloat16
    deterministic: bool = False  # linears whose rows do not depend on their batch, and no other products
    products: Products = NO_PRODUCTS  # products of 8-bit numbers that the device has
    few_bits: bool = False  # products of weights of few bits, that the device has

    @staticmethod
    def none() -> "SurgeryPlan":
        return SurgeryPlan(norms=False, attention=False, mlp=False, layers=False, linears=False, joined=False)


@torch.no_grad()
def apply(model: PreTrainedModel, plan: SurgeryPlan) -> list[str]:
    """Change `model` in place; returns a sentence that lists the changes."""
    windows = layer_windows(model.config)

    def window_of(module: nn.Module) -> int:
        layer = getattr(module, "layer_idx", getattr(getattr(module, "self_attn", None), "layer_idx", None))
        return windows[int(layer or 0)] or 0

    packs = plan.mlp and plan.linears and library.missing() is None
    pieces: list[tuple[bool, str, Callable[[nn.Module], nn.Module | None]]] = [
        (plan.norms, "norms", fuse_norm),
        (plan.norms, "rotary embeddings", fuse_rotary),
        (plan.attention, "attentions", _Once(fuse_attention, window_of)),
        (plan.attention, "DeltaNets", _Once(fuse_delta_net, window_of)),
        (plan.mlp, "MLPs", _Once(lambda module, _window, verify: fuse_mlp(module, verify), window_of)),
        (plan.few_bits, "experts of codes", _Once(put_experts_on_gpu, window_of)),
        (packs, "experts and routers", _Once(fuse_experts, window_of)),
        (packs, "shared experts", _Once(fuse_shared_experts, window_of)),
        (plan.layers, "layers", _Once(fuse_layer, window_of)),
        (any(plan.products) or plan.few_bits, "linears of codes", OnGpu(plan.products, plan.few_bits)),
        (
            plan.linears or plan.deterministic,
            "linears",
            partial(make_linear_invariant if plan.deterministic else pack_linear, bf16=plan.bf16),
        ),
    ]
    counts = {name: _replace(model, fuse) for wanted, name, fuse in pieces if wanted}
    if any(plan.products):
        counts["roundings"] = round_in_place(model)
    if plan.linears:
        counts["left factors"] = _replace_left_factors(model)
    check_experts(model)
    if plan.deterministic:
        check_invariant(model)
    changed = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return [f"Fused from outside: {changed}."] if changed else []


class _Once:
    """Verifies a replacement for the first module of a kind; the result applies to modules of equal structure and
    window.
    """

    def __init__(
        self, fuse: Callable[[nn.Module, int, bool], nn.Module | None], window_of: Callable[[nn.Module], int]
    ) -> None:
        self._fuse = fuse
        self._window_of = window_of
        self._results: dict[object, bool] = {}

    def __call__(self, module: nn.Module) -> nn.Module | None:
        options = [
            (name, value)
            for name, value in vars(module).items()
            if isinstance(value, (int, float, str)) and name != "layer_idx"
        ]
        window = self._window_of(module)
        kind = (type(module), repr(module), window, *sorted(options))
        result = self._results.get(kind)
        if result is False:
            return None
        fused = self._fuse(module, window, result is None)
        self._results[kind] = fused is not None
        return fused


def _replace(model: nn.Module, replacement: Callable[[nn.Module], nn.Module | None]) -> int:
    """Replace every submodule for which `replacement` returns one; children of a replaced module stay unchanged."""
    count = 0
    pending = [model]
    while pending:
        parent = pending.pop()
        for name, child in list(parent.named_children()):
            # A parent that reads a child's weight expects transformers' own module.
            new = None if reads_weight(parent, name) else replacement(child)
            if new is None:
                pending.append(child)
            else:
                setattr(parent, name, new.train(child.training))
                count += 1
    return count


def _replace_left_factors(model: nn.Module) -> int:
    count = 0
    for parent in list(model.modules()):
        for name, _ in list(parent.named_children()):
            if (factor := pack_left_factor(parent, name)) is not None:
                setattr(parent, name, factor.eval())
                count += 1
    return count

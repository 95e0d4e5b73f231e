"""A gated MLP with gate and up projections in one product, and activation and product in one operation."""

from torch import Tensor, nn

import headrace_kernels.ops as ops
from headrace_kernels.rounded import Rounded
from headrace_worker.model.surgery.linears import is_plain, merge_linears
from headrace_worker.model.surgery.verify import TOKENS, agrees, random_input


class FusedMlp(nn.Module):
    """down(act(gate) · up), gate and up being the halves of one product; act is SiLU or GELU by the tangent."""

    rounding: bool | None = None  # rounding of the activation's result, as `FusedRmsNorm.rounding`

    def __init__(self, gate_up: nn.Module, down: nn.Module, gelu: bool, down_name: str = "down_proj") -> None:
        """down_name: of the submodule, as in the original: ranks wrap it by its name."""
        super().__init__()
        self.gelu = gelu
        self.gate_up_proj = gate_up
        self.down_name = down_name
        self.add_module(down_name, down)

    def forward(self, hidden_states: Tensor | Rounded) -> Tensor:
        """hidden_states [..., N] -> [..., N]."""
        gate_up = self.gate_up_proj(hidden_states)
        if self.rounding is not None:
            inner: Tensor | Rounded = ops.rounded_silu_mul(gate_up, self.rounding)
        else:
            inner = (ops.gelu_mul if self.gelu else ops.silu_mul)(gate_up)
        out: Tensor = self.get_submodule(self.down_name)(inner)
        return out


# What some families call gate_proj, up_proj and down_proj. They compute SiLU without a module for it.
_NUMBERED = ("w1", "w3", "w2")


def activation(module: nn.Module) -> bool | None:
    """Whether a module's activation is GELU by the tangent; None unless that or SiLU."""
    name = type(getattr(module, "act_fn", getattr(module, "activation_fn", None))).__name__
    return True if name == "GELUTanh" else False if name in ("SiLU", "SiLUActivation") else None


def fuse_mlp(module: nn.Module, verify: bool) -> FusedMlp | None:
    """The replacement of a gated MLP, or None."""
    children = {name: child for name, child in module.named_children() if name not in ("act_fn", "activation_fn")}
    numbered = set(children) == {*_NUMBERED}
    gate, up, down = _NUMBERED if numbered else ("gate_proj", "up_proj", "down_proj")
    gelu = False if numbered else activation(module)
    if gelu is None or not all(map(is_plain, children.values())):
        return None
    if set(children) == {gate, up, down}:
        gate_up: nn.Module = merge_linears([children[gate], children[up]])
    elif set(children) == {"gate_up_proj", down}:
        gate_up = children["gate_up_proj"]
    else:
        return None
    fused = FusedMlp(gate_up, children[down], gelu, down)
    if verify:
        weight = children[down].weight
        assert isinstance(weight, Tensor)
        x = random_input(weight, 1, TOKENS, weight.shape[0])
        if not agrees(lambda: module(x), lambda: fused(x)):
            return None
    return fused

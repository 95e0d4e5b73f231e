"""Gated DeltaNet with all projections of its input in one product, and every operation after it of this package.

Those of torch differ in their last bits by the place of an entry in its tensor, so by the batch.

Shape letters: T tokens, N hidden size, K key heads, H value heads, D and E sizes of their heads, W taps, C channels.
"""

from typing import Any

import torch
from torch import Tensor, nn

import headrace_kernels.ops as ops
from headrace_worker.model.recurrent import layer_state
from headrace_worker.model.surgery.linears import is_plain, merge_linears, take_outputs
from headrace_worker.model.surgery.verify import TOKENS, TinyStep, agrees, random_input

_SEPARATE = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
_BY_KEY_HEAD = ("in_proj_qkvz", "in_proj_ba")


class FusedDeltaNet(nn.Module):
    """Gated DeltaNet (Yang et al. 2024, arXiv:2412.06464) over the states of a step, in the form of Qwen."""

    taps: Tensor  # [W, C]
    rate: Tensor  # [H]
    dt_bias: Tensor  # [H]

    def __init__(self, original: Any, in_proj: nn.Module) -> None:
        """in_proj: [N] to channels of query, key and value, then the output's gate, beta's input and the decay's."""
        super().__init__()
        self.layer_idx = int(original.layer_idx)
        self.heads, self.key_dim, self.value_dim = len(original.A_log), original.head_k_dim, original.head_v_dim
        taps = original.conv1d.weight[:, 0].t()
        self.channels, values = taps.shape[1], self.heads * self.value_dim
        self.key_heads = (self.channels - values) // (2 * self.key_dim)
        self.register_buffer("taps", taps.contiguous())
        self.register_buffer("rate", original.A_log.float().exp())
        self.register_buffer("dt_bias", original.dt_bias.float())
        self.norm_weight = original.norm.weight
        self.norm_eps = float(original.norm.variance_epsilon)
        self.in_proj, self.out_proj = in_proj, original.out_proj

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """hidden_states [1, T, N] -> [1, T, N]."""
        values = self.heads * self.value_dim
        sizes = [self.channels, values, self.heads, self.heads]
        mixed, gate, b, a = torch.split(self.in_proj(hidden_states)[0], sizes, 1)
        inputs, meta = layer_state(self.layer_idx, "conv")
        states, _meta = layer_state(self.layer_idx, "recurrent")
        keys = self.key_heads * self.key_dim
        mixed = ops.causal_conv(mixed, self.taps.t(), inputs, meta, None, True)
        query = mixed[:, :keys].view(-1, self.key_heads, self.key_dim)
        key = mixed[:, keys : 2 * keys].view(-1, self.key_heads, self.key_dim)
        value = mixed[:, 2 * keys :].view(-1, self.heads, self.value_dim)
        decay = ops.softplus(a.float() + self.dt_bias) * -self.rate
        out = ops.delta_rule(query, key, value, decay, ops.sigmoid(b), states, meta)
        out = ops.rms_norm(out, self.norm_weight, self.norm_eps).flatten(1) * (gate * ops.sigmoid(gate))
        result: Tensor = self.out_proj(out[None].to(hidden_states.dtype))
        return result


def fuse_delta_net(module: nn.Module, window: int, verify: bool) -> FusedDeltaNet | None:
    """The replacement of a Gated DeltaNet whose functions are redirected already, or None."""
    children = dict(module.named_children())
    names = set(children) - {"conv1d", "norm", "out_proj"}
    if names not in ({*_SEPARATE}, {*_BY_KEY_HEAD}) or len(children) != len(names) + 3:
        return None
    linears = [children[name] for name in (_SEPARATE if "in_proj_z" in names else _BY_KEY_HEAD)]
    if not all(map(is_plain, (*linears, children["out_proj"]))) or getattr(module, "activation", "") != "silu":
        return None
    if len(linears) == len(_BY_KEY_HEAD):
        linears = _sorted_by_part(module, *linears)
    merged = merge_linears(linears)
    fused = FusedDeltaNet(module, merged)
    if verify:
        x = random_input(merged.weight, 1, TOKENS, merged.in_features)
        states = {
            "conv": x.new_zeros(1, *(fused.taps.shape[0] - 1, fused.channels)),
            "recurrent": torch.zeros(1, fused.heads, fused.key_dim, fused.value_dim, device=x.device),
        }
        step = TinyStep(fused.layer_idx, 1, 2, window, x, states)
        if not agrees(lambda: step.run(module, x), lambda: step.run(fused, x)):
            return None
    return fused


def _sorted_by_part(module: Any, qkvz: nn.Module, ba: nn.Module) -> list[nn.Module]:
    """Linears whose outputs are grouped by key head, with all heads' outputs of a part side by side."""
    group = module.num_v_heads // module.num_k_heads
    values = group * module.head_v_dim
    sorted_linears: list[nn.Module] = []
    for linear, sizes in ((qkvz, [module.head_k_dim] * 2 + [values] * 2), (ba, [group, group])):
        assert isinstance(linear, nn.Linear)
        rows = torch.split(torch.arange(linear.out_features).view(-1, sum(sizes)), sizes, 1)
        sorted_linears.append(take_outputs(linear, torch.cat([part.flatten() for part in rows])))
    return sorted_linears

"""Which part of a layer with recurrent state a rank has: some heads or channels of it, whole with their state.

A rule names a layer's tensors, and those of its attributes that are sizes, each as sections one after another. A layer
is recognised by its structure. To add a kind, add its rule here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from headrace_base.errors import ModelUnsupportedError
from headrace_worker.core.transfer.shards import Span
from headrace_worker.model.sharding.cuts import even, scaled

Section = tuple[int, int]  # how many units, and the entries of each


@dataclass(frozen=True, slots=True)
class RecurrentRule:
    """How a layer is cut. Names that it does not have are left out."""

    unit: str  # plural, for people
    units: int  # the ranks must divide them
    parts: dict[str, tuple[Section, ...]]  # outputs of linears and convolutions, entries of parameters and norms, sizes
    inputs: dict[str, tuple[Section, ...]]  # inputs of linears whose outputs are summed over the ranks
    whole: tuple[str, ...] = ()  # modules that every rank has


def is_recurrent(module: nn.Module) -> bool:
    """Whether a module is a layer's part with recurrent state: all kinds begin with a convolution over tokens."""
    return hasattr(module, "layer_idx") and any(isinstance(child, nn.Conv1d) for child in module.children())


def recurrent_rule(layer: Any, family: str) -> RecurrentRule:
    """The rule of a whole layer. Raises ModelUnsupportedError for a kind that has none."""
    make = next((make for names, make in _RULES if all(hasattr(layer, name) for name in names)), None)
    rule = make(layer) if make is not None else None
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    names = {name.partition(".")[0] for name, _ in tensors}
    if rule is None or names - rule.parts.keys() - rule.inputs.keys() - set(rule.whole):
        raise ModelUnsupportedError(
            f"{family} keeps recurrent state, which is not sharded yet: serve it with --tp 1 --pp 1."
        )
    return rule


def section_spans(sections: tuple[Section, ...], rank: int, ranks: int) -> tuple[Span, ...]:
    """The rank's entries: its equal share of the units of each section.

    Where there are more ranks than units, several ranks have the same one. Raises ModelUnsupportedError when neither
    number divides the other.
    """
    spans, offset = [], 0
    for units, size in sections:
        spans.append(scaled(unit_span(units, rank, ranks), size, offset))
        offset += units * size
    return tuple(spans)


def unit_span(units: int, rank: int, ranks: int) -> Span:
    """The rank's share of a section's units."""
    if units < ranks and ranks % units == 0:
        unit = rank * units // ranks
        return unit, unit + 1
    return even(units, rank, ranks, "groups of heads")


def _gated_delta_net(layer: Any) -> RecurrentRule:
    """Key heads, each with its value heads: Qwen3-Next interleaves their projections, others store them by section."""
    keys, values = (layer.num_k_heads, layer.head_k_dim), (layer.num_v_heads, layer.head_v_dim)
    heads, ratio = (layer.num_v_heads, 1), layer.num_v_heads // layer.num_k_heads
    group = 2 * layer.head_k_dim + 2 * ratio * layer.head_v_dim
    return RecurrentRule(
        unit="key heads",
        units=layer.num_k_heads,
        parts={
            **dict.fromkeys(("in_proj_qkv", "conv1d", "conv_dim"), (keys, keys, values)),
            **dict.fromkeys(("q_proj", "k_proj", "key_dim"), (keys,)),
            **dict.fromkeys(("in_proj_z", "v_proj", "g_proj", "value_dim"), (values,)),
            **dict.fromkeys(("in_proj_b", "in_proj_a", "a_proj", "b_proj"), (heads,)),
            **dict.fromkeys(("A_log", "dt_bias", "num_v_heads"), (heads,)),
            "in_proj_qkvz": ((layer.num_k_heads, group),),
            "in_proj_ba": ((layer.num_k_heads, 2 * ratio),),
            "num_k_heads": ((layer.num_k_heads, 1),),
        },
        inputs=dict.fromkeys(("out_proj", "o_proj"), (values,)),
        whole=("norm", "o_norm"),  # norms of one head
    )


def _mamba2(layer: Any) -> RecurrentRule:
    """Heads. Those of a group share B and C, which several ranks have alike where there are fewer groups than ranks."""
    heads, inner = (layer.num_heads, 1), (layer.num_heads, layer.head_dim)
    groups, states = (layer.n_groups, 1), (layer.n_groups, layer.ssm_state_size)
    return RecurrentRule(
        unit="heads",
        units=layer.num_heads,
        parts={
            "in_proj": (inner, inner, states, states, heads),
            **dict.fromkeys(("conv1d", "conv_dim"), (inner, states, states)),
            **dict.fromkeys(("A_log", "D", "dt_bias", "num_heads"), (heads,)),
            "intermediate_size": (inner,),
            "n_groups": (groups,),
            **({"norm": (inner,)} if hasattr(getattr(layer, "norm", None), "group_size") else {}),
        },
        inputs={"out_proj": (inner,)},
    )


def _mamba1(layer: Any) -> RecurrentRule:
    """Channels. The projection to B, C and the time step reads all of them: it is summed."""
    channels = (layer.intermediate_size, 1)
    return RecurrentRule(
        unit="channels",
        units=layer.intermediate_size,
        parts={
            "in_proj": (channels, channels),
            **dict.fromkeys(("conv1d", "dt_proj", "A_log", "D", "intermediate_size"), (channels,)),
        },
        inputs=dict.fromkeys(("x_proj", "out_proj"), (channels,)),
        whole=("dt_layernorm", "b_layernorm", "c_layernorm"),
    )


def _short_convolution(layer: Any) -> RecurrentRule:
    """Channels, with sections B, C and x."""
    channels = (layer.conv.in_channels, 1)
    return RecurrentRule(
        unit="channels",
        units=layer.conv.in_channels,
        parts={"in_proj": (channels, channels, channels), "conv": (channels,)},
        inputs={"out_proj": (channels,)},
    )


# By the names that show the kind.
_RULES: tuple[tuple[tuple[str, ...], Callable[[Any], RecurrentRule]], ...] = (
    (("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv1d"), _gated_delta_net),
    (("num_heads", "head_dim", "n_groups", "ssm_state_size", "in_proj", "conv1d", "out_proj"), _mamba2),
    (("intermediate_size", "in_proj", "conv1d", "x_proj", "dt_proj", "out_proj"), _mamba1),
    (("in_proj", "conv", "out_proj"), _short_convolution),
)

"""Which part of a layer with recurrent state a rank has: some heads or channels of it, whole with their state.

A rule names a layer's tensors, and those of its attributes that are sizes, each as sections one after another. A layer
is recognised by its structure. To add a kind, add its rule here.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

from headrace_proto.errors import ModelUnsupportedError
from headrace_worker.core.transfer.shards import Span
from headrace_worker.model.sharding.cuts import even, scaled

Section = tuple[int, int]  # how many units, and the entries of each


@dataclass(frozen=True, slots=True)
class RecurrentRule:
    """How a layer is cut. Names that it does not have are left out."""

    unit: str  # plural, for people
    units: int  # the ranks must divide them
    parts: dict[str, tuple[Section, ...]]  # outputs of linears and convolutions, entries of parameters, sizes
    inputs: dict[str, tuple[Section, ...]]  # of linears whose outputs are summed over the ranks
    whole: tuple[str, ...] = ()  # modules that every rank has


def is_recurrent(module: nn.Module) -> bool:
    """Whether a module is a layer's part with recurrent state: all kinds begin with a convolution over tokens."""
    return hasattr(module, "layer_idx") and any(isinstance(child, nn.Conv1d) for child in module.children())


def recurrent_rule(layer: Any, family: str) -> RecurrentRule:
    """The rule of a whole layer. Raises ModelUnsupportedError for a kind that has none."""
    make = next((make for names, make in _RULES if all(hasattr(layer, name) for name in names)), None)
    rule = make(layer) if make is not None else None
    names = {name.partition(".")[0] for name, _ in layer.named_parameters()}
    if rule is None or names - rule.parts.keys() - rule.inputs.keys() - set(rule.whole):
        raise ModelUnsupportedError(
            f"{family} keeps recurrent state, which is not sharded yet: serve it with --tp 1 --pp 1."
        )
    return rule


def section_spans(sections: tuple[Section, ...], rank: int, ranks: int) -> tuple[Span, ...]:
    """The rank's entries: its equal share of the units of each section.

    Where there are more ranks than units, several ranks have the same one. Raises ModelUnsupportedError when the ranks
    do not divide the units, nor these the ranks.
    """
    spans, offset = [], 0
    for units, size in sections:
        shared = units < ranks and not ranks % units
        span = even(units, rank * units // ranks, units, "") if shared else even(units, rank, ranks, "units")
        spans.append(scaled(span, size, offset))
        offset += units * size
    return tuple(spans)


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
            **dict.fromkeys(("in_proj_b", "in_proj_a", "a_proj", "b_proj", "A_log", "dt_bias", "num_v_heads"), (heads,)),
            "in_proj_qkvz": ((layer.num_k_heads, group),),
            "in_proj_ba": ((layer.num_k_heads, 2 * ratio),),
            "num_k_heads": ((layer.num_k_heads, 1),),
        },
        inputs=dict.fromkeys(("out_proj", "o_proj"), (values,)),
        whole=("norm", "o_norm"),  # of one head
    )


# By the names that show the kind.
_RULES: tuple[tuple[tuple[str, ...], Callable[[Any], RecurrentRule]], ...] = (
    (("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv1d"), _gated_delta_net),
)

"""The cache layout of a model: which layers share a span and KV shape, split into groups of equally many layers."""

from typing import Any

from headrace_proto.errors import ModelUnsupportedError
from headrace_worker.comm.parallel_context import SINGLE, ParallelContext
from headrace_worker.core.layout import CacheGroupSpec, CacheLayout, StateSpec
from headrace_worker.model.config_sizes import config_size, optional_size
from headrace_worker.model.refusals import ATTENTION_TYPES, check_layer_types
from headrace_worker.model.sharding.places import local_kv_heads, stage_layers


def cache_layout(
    config: Any,
    block_size: int,
    element_bytes: int,
    parallel: ParallelContext = SINGLE,
    states: tuple[StateSpec, ...] = (),
) -> CacheLayout:
    """Derive a rank's layout from a transformers text config.

    All ranks have the same groups, since a block belongs to a group on all of them; a group's layers are those of the
    rank's stage, and with several stages there may be fewer of them than the pool has slots, or none.

    states: of its layers with recurrent state. Raises ModelUnsupportedError for layers of unknown kinds.
    """
    windows = layer_windows(config)
    stages = stage_layers(len(windows), parallel.pp_size)
    spans = sorted({window for window in windows if window is not None})
    counts = {window: [windows[first:stop].count(window) for first, stop in stages] for window in spans}
    groups_of = _groups(counts)
    first, stop = stages[parallel.pp_rank]
    groups: list[CacheGroupSpec] = []
    for window, number in groups_of.items():
        members = [layer for layer in range(first, stop) if windows[layer] == window]
        share = -(-len(members) // number)
        for index in range(number):
            groups.append(
                CacheGroupSpec(
                    index=len(groups),
                    layers=tuple(members[index * share : (index + 1) * share]),
                    num_kv_heads=local_kv_heads(config, parallel),
                    head_dim=head_size(config),
                    window=window,
                )
            )
    return CacheLayout(block_size, tuple(groups), element_bytes, states)


def _groups(counts: dict[int, list[int]]) -> dict[int, int]:
    """Number of groups for the layers of each window, from their number on each stage.

    A token needs a block of every group, and a block has as many slots as the largest group of a stage has layers: of
    all splits, the one whose fullest stage takes the least memory, then the one with the fewest groups. On one stage
    nothing is wasted: groups of the largest size that divides all numbers.
    """
    choices = []
    for size in range(1, max(max(numbers) for numbers in counts.values()) + 1):
        groups = {window: max(-(-number // size) for number in numbers) for window, numbers in counts.items()}
        slots = max(-(-number // groups[window]) for window, numbers in counts.items() for number in numbers)
        total = sum(groups.values())
        choices.append((slots * total, total, groups))
    return min(choices, key=lambda choice: choice[:2])[2]


def head_size(config: Any) -> int:
    """Size of a head, from the config."""
    heads = config_size(config, "num_attention_heads")
    return optional_size(config, "head_dim") or config_size(config, "hidden_size") // heads


def layer_windows(config: Any) -> list[int | None]:
    """Per layer the number of tokens a query attends to, itself included; 0 = all, None = it does not attend."""
    layers = config_size(config, "num_hidden_layers")
    sliding = optional_size(config, "sliding_window")
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        uses = sliding and getattr(config, "use_sliding_window", True)
        return [sliding if uses else 0] * layers
    if len(kinds) != layers:
        raise ModelUnsupportedError(
            f"This {config.model_type} model has {layers} layers, but {len(kinds)} layer_types: check config.json."
        )
    check_layer_types(config)
    if "sliding_attention" in kinds and not sliding:
        raise ModelUnsupportedError(f"This {config.model_type} model has sliding layers, but no sliding_window.")
    windows = dict.fromkeys(ATTENTION_TYPES, 0) | {"sliding_attention": sliding}
    return [windows.get(kind) for kind in kinds]

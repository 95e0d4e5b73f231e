"""The cache layout of a model: which layers share a span and KV shape, split into groups of about equal size."""

from collections.abc import Mapping
from typing import Any

from headrace_base.errors import ModelUnsupportedError
from headrace_kernels.kv_format import SCALE_BYTES
from headrace_worker.comm.parallel_context import SINGLE, ParallelContext
from headrace_worker.core.layout import CacheGroupSpec, CacheLayout, StateSpec
from headrace_worker.model.config_sizes import config_size, layer_sizes
from headrace_worker.model.refusals import ATTENTION_TYPES, check_equal_sizes, check_layer_types
from headrace_worker.model.sharding.places import KvShape, kv_shapes, stage_layers

Kind = tuple[int, KvShape]  # window (0 = all), what is cached


def cache_layout(
    config: Any,
    block_size: int,
    element_bytes: int,
    parallel: ParallelContext = SINGLE,
    states: tuple[StateSpec, ...] = (),
    kv_format: str = "",
) -> CacheLayout:
    """Derive a rank's layout from a transformers text config.

    All ranks have the same groups, since a block belongs to a group on all of them; a group's layers are those of the
    rank's stage, and with several stages there may be fewer of them than the pool has slots, or none.

    states: of its layers with recurrent state. kv_format: of 8 bits, or none. Raises ModelUnsupportedError for layers
    of unknown kinds.
    """
    kinds = layer_kinds(config)
    if kv_format:
        check_kv_format(config)
    stages = stage_layers(len(kinds), parallel.pp_size)
    counts = {
        kind: [kinds[first:stop].count(kind) for first, stop in stages]
        for kind in sorted({kind for kind in kinds if kind is not None})
    }
    shares = _shares([shape for _, shape in counts])
    groups_of = _groups({kind: (shares[kind[1]], numbers) for kind, numbers in counts.items()})
    first, stop = stages[parallel.pp_rank]
    groups: list[CacheGroupSpec] = []
    for kind, number in groups_of.items():
        window, shape = kind
        members = [layer for layer in range(first, stop) if kinds[layer] == kind]
        most = _quotient(len(members), number)
        start, end = shape.span(parallel)
        for index in range(number):
            groups.append(
                CacheGroupSpec(
                    index=len(groups),
                    layers=tuple(members[index * most : (index + 1) * most]),
                    num_kv_heads=end - start,
                    head_dim=shape.key,
                    window=window,
                    value_dim=None if shape.value == shape.key else shape.value,
                    share=shares[shape],
                    first_head=start,
                    scale_bytes=SCALE_BYTES if kv_format else 0,
                )
            )
    return CacheLayout(block_size, tuple(groups), element_bytes, states, kv_format=kv_format)


def check_kv_format(config: Any) -> None:
    """Raises ModelUnsupportedError for a model whose keys and values cannot have 8 bits."""
    check_equal_sizes(all(kind is None or kind[1].key == kind[1].value for kind in layer_kinds(config)))


def _shares(shapes: list[KvShape]) -> dict[KvShape, int]:
    """How many layers of each shape have space in a slot for one of the largest."""
    entries = {shape: (shape.heads * shape.key, shape.heads * shape.value) for shape in shapes}
    largest = [max(part) for part in zip(*entries.values(), strict=True)]
    return {
        shape: min(most // size for most, size in zip(largest, entry, strict=True) if size)
        for shape, entry in entries.items()
    }


def _groups(counts: Mapping[Kind, tuple[int, list[int]]]) -> dict[Kind, int]:
    """Number of groups for the layers of each kind, from how many share a slot, and their number on each stage.

    A token needs a block of every group, and a block has as many slots as the largest group of a stage: of all splits,
    the one whose fullest stage takes the least memory, then the one with the fewest groups. On one stage nothing is
    wasted if all shapes are equal: groups of the largest size that divides all numbers.
    """
    slots = {kind: [_quotient(number, share) for number in numbers] for kind, (share, numbers) in counts.items()}
    choices = []
    for size in range(1, max(map(max, slots.values())) + 1):
        groups = {kind: max(_quotient(number, size) for number in numbers) for kind, numbers in slots.items()}
        most = max(
            _quotient(_quotient(number, groups[kind]), share)
            for kind, (share, numbers) in counts.items()
            for number in numbers
        )
        total = sum(groups.values())
        choices.append((most * total, total, groups))
    return min(choices, key=lambda choice: choice[:2])[2]


def _quotient(number: int, size: int) -> int:
    """Rounded up: how many parts of `size` hold `number` things."""
    return -(-number // size)


def layer_kinds(config: Any) -> list[Kind | None]:
    """The kind of each layer; None for a layer that caches nothing: without attention, or with another layer's keys."""
    sources = kv_sources(config)
    kinds = zip(layer_windows(config), kv_shapes(config), strict=True)
    return [
        None if window is None or layer in sources else (window, shape) for layer, (window, shape) in enumerate(kinds)
    ]


def kv_sources(config: Any) -> dict[int, int]:
    """Layers that attend to the keys and values of an earlier layer, and which: the last one of the same kind."""
    shared, kinds = getattr(config, "num_kv_shared_layers", None), getattr(config, "layer_types", None)
    if not shared or not isinstance(kinds, list | tuple):
        return {}
    own = len(kinds) - shared
    found = {layer: [n for n in range(own) if kinds[n] == kinds[layer]] for layer in range(own, len(kinds))}
    if not all(found.values()):
        raise ModelUnsupportedError(
            f"The last {shared} layers of this {config.model_type} model use keys and values of earlier ones of their "
            "kind, but some have none: check config.json."
        )
    return {layer: sources[-1] for layer, sources in found.items()}


def layer_windows(config: Any) -> list[int | None]:
    """Per layer the number of tokens a query attends to, itself included; 0 = all, None = it does not attend."""
    layers = config_size(config, "num_hidden_layers")
    sliding = layer_sizes(config, "sliding_window", layers)
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        uses = getattr(config, "use_sliding_window", True)
        return [size if uses else 0 for size in sliding]
    if len(kinds) != layers:
        raise ModelUnsupportedError(
            f"This {config.model_type} model has {layers} layers, but {len(kinds)} layer_types: check config.json."
        )
    check_layer_types(config)
    if any(kind == "sliding_attention" and not size for kind, size in zip(kinds, sliding, strict=True)):
        raise ModelUnsupportedError(f"This {config.model_type} model has sliding layers, but no sliding_window.")
    return [
        size if kind == "sliding_attention" else 0 if kind in ATTENTION_TYPES else None
        for kind, size in zip(kinds, sliding, strict=True)
    ]

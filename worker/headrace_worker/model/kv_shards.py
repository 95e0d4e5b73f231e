"""How KV blocks and recurrent states are sharded over a replica's ranks: for transfers between replicas."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from headrace_worker.comm.parallel_context import ParallelContext
from headrace_worker.core.layout import StatePart
from headrace_worker.core.transfer.shards import STATE_WINDOW, GroupShard, KvGroup, KvShards, RankShard
from headrace_worker.model.cache_layout import cache_layout
from headrace_worker.model.isolated_rank import IsolatedRank
from headrace_worker.model.refusals import STATE_TYPES
from headrace_worker.model.sharding.places import stage_layers
from headrace_worker.model.sharding.recurrent import unit_span


def kv_shards(
    config: Any,
    dtype: str,
    block_size: int,
    element_bytes: int,
    tp: int,
    pp: int,
    parts: tuple[StatePart, ...] = (),
    kv_format: str = "",
) -> KvShards:
    """The shards of all ranks of a replica, in rank order, from a transformers text config; without their memory.

    parts: of each layer with recurrent state. After the cache groups follow groups of states, by their number of units.
    """
    ranks = []
    layout = None
    kinds = getattr(config, "layer_types", None) or ()
    tensors = state_tensors(parts)
    for stage, (first, stop) in enumerate(stage_layers(int(config.num_hidden_layers), pp)):
        keeping = tuple(layer for layer in range(first, stop) if parts and kinds[layer] in STATE_TYPES)
        for place in range(tp):
            layout = cache_layout(
                config, block_size, element_bytes, ParallelContext(IsolatedRank(place, tp), stage, pp),
                kv_format=kv_format,
            )  # fmt: skip
            groups = [GroupShard(group.layers, group.heads) for group in layout.groups]
            groups += [GroupShard(keeping, unit_span(units, place, tp)) for units in tensors]
            ranks.append(RankShard(tuple(groups)))
    assert layout is not None
    kv_groups = []
    for group in layout.groups:
        sizes = (entry // group.num_kv_heads for entry in group.entries if entry)
        kv_groups.append(KvGroup(group.window, tuple(block_size * size * layout.entry_bytes for size in sizes)))
    for found in tensors.values():
        sizes = (part.sections[section][1] * part.entry_bytes(element_bytes) for part, _, section in found)
        kv_groups.append(KvGroup(STATE_WINDOW, tuple(sizes)))
    return KvShards(block_size, dtype, tuple(kv_groups), tuple(ranks))


def state_tensors(parts: tuple[StatePart, ...]) -> dict[int, list[tuple[StatePart, int, int]]]:
    """By number of units, what moves of a layer's states: a part, its row and section, in order."""
    found: dict[int, list[tuple[StatePart, int, int]]] = {}
    for part in parts:
        for row in range(part.rows):
            for section, (units, _) in enumerate(part.sections):
                found.setdefault(units, []).append((part, row, section))
    return found


def state_memory(
    parts: tuple[StatePart, ...], groups: Sequence[GroupShard], states: Mapping[tuple[int, str], Tensor]
) -> tuple[tuple[tuple[tuple[int, ...], ...], ...], tuple[tuple[int, ...], ...]]:
    """Addresses of slot 0 by group, layer and tensor, and bytes from one slot to the next by group and tensor.

    groups: of states, of a rank. states: [slots, ...] by layer and kind.
    """
    tensors = state_tensors(parts)
    share = {units: group.units[1] - group.units[0] for units, group in zip(tensors, groups, strict=True)}
    addresses, strides = [], []
    for group, found in zip(groups, tensors.values(), strict=True):
        layers = [
            tuple(_state_address(states[layer, part.kind], part, row, section, share) for part, row, section in found)
            for layer in group.layers
        ]
        pools = [states[group.layers[0], part.kind] for part, _, _ in found] if group.layers else []
        addresses.append(tuple(layers))
        strides.append(tuple(pool.stride(0) * pool.itemsize for pool in pools))
    return tuple(addresses), tuple(strides)


def _state_address(pool: Tensor, part: StatePart, row: int, section: int, share: Mapping[int, int]) -> int:
    """share: units of this rank by those of the whole model."""
    widths = [share[units] * size for units, size in part.sections]
    return int(pool.data_ptr()) + (row * sum(widths) + sum(widths[:section])) * pool.itemsize

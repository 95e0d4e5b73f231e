"""Where the pieces of blocks are in two ranks' memory, in the order in which one is read into the other."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from headrace_worker.core.transfer.shards import KvShards, RankShard, Route, Span

SLICES = 8  # most slices of a route's layers: a slice is read as soon as all of its layers are computed

Layers = tuple[tuple[int, int], ...]  # (cache group, place among the layers of the route in that group)


def layer_slices(route: Route) -> list[Layers]:
    """The layers of a route in the order in which they are computed, in up to SLICES parts; the same on both sides."""
    layers = sorted(
        (layer, group, place) for group, shard in enumerate(route.groups) for place, layer in enumerate(shard.layers)
    )
    size = -(-len(layers) // SLICES)
    return [
        tuple((group, place) for _, group, place in layers[first : first + size])
        for first in range(0, len(layers), size)
    ]


def pieces(
    shards: KvShards, rank: RankShard, route: Route, layers: Layers, blocks: Sequence[Sequence[int]]
) -> NDArray[np.uint64]:
    """[n, 2] address and bytes of a rank's pieces of these blocks (per cache group), for a slice of a route's layers.

    Each layer's tensors in order, of each the blocks in order.
    """
    parts = [np.empty((0, 2), np.uint64)]
    for group, place in layers:
        held, moved = rank.groups[group], route.groups[group]
        numbers = np.asarray(blocks[min(group, len(blocks) - 1)], np.uint64)  # the last ones are of all states
        addresses = rank.addresses[group][held.layers.index(moved.layers[place])]
        sizes = shards.groups[group].unit_bytes
        for address, stride, size in zip(addresses, rank.strides[group], sizes, strict=True):
            start = address + _units(held.units, moved.units[0]) * size
            length = np.full(len(numbers), (moved.units[1] - moved.units[0]) * size, np.uint64)
            parts.append(np.column_stack((numbers * np.uint64(stride) + np.uint64(start), length)))
    return np.concatenate(parts)


def _units(held: Span, first: int) -> int:
    return first - held[0]


def joined(theirs: NDArray[np.uint64], mine: NDArray[np.uint64]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """The same pieces, with those in one that follow each other on both sides."""
    if not len(mine):
        return theirs, mine
    follows = [(side[1:, 0] == side[:-1, 0] + side[:-1, 1]) for side in (theirs, mine)]
    starts = np.flatnonzero(np.concatenate(([True], ~(follows[0] & follows[1]))))
    sizes = np.add.reduceat(mine[:, 1], starts)
    return np.column_stack((theirs[starts, 0], sizes)), np.column_stack((mine[starts, 0], sizes))

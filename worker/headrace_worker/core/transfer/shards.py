"""Which rank holds which part of the KV cache, on both sides, and the routes between them: pure arithmetic.

A replica's ranks hold parts of every block: some layers (their stage's), and of each tensor of a layer some units: KV
heads, of which a rank has its share, or one that several ranks replicate. Source and target may be sharded differently;
what moves is (layer, block, span of units).
"""

from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct

Span = tuple[int, int]  # [start, stop)


class GroupShard(Struct, frozen=True):
    """One rank's part of a cache group's blocks."""

    layers: tuple[int, ...]  # by index in the model
    units: Span


class RankShard(Struct, frozen=True):
    """One rank's part of each block, per cache group, and where it is in the rank's memory."""

    groups: tuple[GroupShard, ...]
    agent: bytes = b""  # what the rank's agent says of itself and its memory; empty: nothing can be read there
    addresses: tuple[tuple[tuple[int, ...], ...], ...] = ()  # addresses of block 0, per group, layer and tensor
    strides: tuple[tuple[int, ...], ...] = ()  # bytes from one block to the next: per group and tensor
    device: int = -1  # index of the GPU; -1 = host memory

    @property
    def layers(self) -> tuple[tuple[int, ...], ...]:
        return tuple(group.layers for group in self.groups)


STATE_WINDOW = 2  # window of a group of recurrent states: the last block counts


class KvGroup(Struct, frozen=True):
    """A cache group: equal layers, each with the same tensors [blocks, units, bytes].

    Recurrent states are further groups, all with the same numbers in place of blocks: those of their slots.
    """

    window: int  # 0 = all
    unit_bytes: tuple[int, ...]  # bytes of one unit of a block, for each tensor of a layer


class KvShards(Struct, frozen=True):
    """How blocks are sharded over a replica's ranks."""

    block_size: int
    dtype: str
    groups: tuple[KvGroup, ...]
    ranks: tuple[RankShard, ...]

    def layers_of(self, group: int) -> frozenset[int]:
        """All layers of a cache group, over the stages."""
        return frozenset(layer for rank in self.ranks for layer in rank.groups[group].layers)

    def units_of(self, group: int) -> int:
        return max(rank.groups[group].units[1] for rank in self.ranks)


class Route(Struct, frozen=True):
    """The part of every block that one target rank reads from one source rank."""

    source: int
    target: int
    groups: tuple[GroupShard, ...]


def mismatch(source: KvShards, target: KvShards) -> str:
    """Why blocks of one cannot be used by the other, as a sentence; empty when they can."""
    if source.block_size != target.block_size:
        return f"blocks of {source.block_size} and of {target.block_size} tokens do not match"
    windows = [[group.window for group in shards.groups] for shards in (source, target)]
    if windows[0] != windows[1]:
        return "the layers' attention spans do not match"
    groups = range(len(source.groups))
    units = [[shards.units_of(group) for group in groups] for shards in (source, target)]
    if (source.dtype, source.groups, units[0]) != (target.dtype, target.groups, units[1]):
        return "KV heads of different number, size or dtype do not match"
    if any(source.layers_of(group) != target.layers_of(group) for group in groups):
        return "the stages group layers of different spans differently: use the same pp on both sides"
    if not (_holds_all_once(source) and _holds_all_once(target)):
        return "the ranks of a replica must hold each part of a block, in one stage"
    return ""


def plan_routes(source: KvShards, target: KvShards) -> list[Route]:
    """All routes, by which every target rank gets its part of each block, each piece once.

    Ranks that replicate the same units share the targets. Raises ValueError when the shards do not match.
    """
    sentence = mismatch(source, target)
    if sentence:
        raise ValueError(sentence)
    routes: dict[tuple[int, int], list[GroupShard]] = {}
    empty = [GroupShard((), (0, 0)) for _ in source.groups]
    for number, wanted in enumerate(target.ranks):
        for holders in _stages(source):
            for group, mine in enumerate(wanted.groups):
                theirs = source.ranks[holders[0]].groups[group]
                layers = tuple(layer for layer in mine.layers if layer in set(theirs.layers))
                for holder, span in _cover(source, group, holders, mine.units, number) if layers else ():
                    routes.setdefault((holder, number), list(empty))[group] = GroupShard(layers, span)
    return [Route(holder, number, tuple(groups)) for (holder, number), groups in routes.items()]


def _stages(shards: KvShards) -> list[list[int]]:
    """Ranks by stage: those of a stage hold the same layers."""
    stages: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for number, rank in enumerate(shards.ranks):
        stages.setdefault(rank.layers, []).append(number)
    return list(stages.values())


def _holds_all_once(shards: KvShards) -> bool:
    """Whether every layer of a group is in one stage, and every stage has all units of its layers."""
    stages = _stages(shards)
    layers = [
        (number, layer)  # a layer's states may be in several groups
        for holders in stages
        for number, group in enumerate(shards.ranks[holders[0]].layers)
        for layer in group
    ]
    return len(set(layers)) == len(layers) and all(
        _is_whole(shards, group, holders) for holders in stages for group in range(len(shards.groups))
    )


def _is_whole(shards: KvShards, group: int, holders: list[int]) -> bool:
    spans = sorted(shards.ranks[rank].groups[group].units for rank in holders)
    joined = all(before[1] >= after[0] for before, after in pairwise(spans))
    return joined and (spans[0][0], max(stop for _, stop in spans)) == (0, shards.units_of(group))


def _cover(shards: KvShards, group: int, holders: list[int], wanted: Span, turn: int) -> list[tuple[int, Span]]:
    """Holders and spans that cover the wanted units."""
    pieces = []
    first, stop = wanted
    while first < stop:
        spans = {rank: shards.ranks[rank].groups[group].units for rank in holders}
        able = [rank for rank, span in spans.items() if span[0] <= first < span[1]]
        chosen = able[turn % len(able)]
        end = min(stop, spans[chosen][1])
        pieces.append((chosen, (first, end)))
        first = end
    return pieces


def wanted_blocks(
    windows: Sequence[int], block_size: int, have: int, blocks: int, *, states: bool = False
) -> list[Span]:
    """Per cache group, the span of the first `blocks` blocks that a replica with the first `have` of them needs.

    In a group with a window only those that a query right after them attends to; of states, the last one.
    """
    spans = []
    for window in windows:
        passed = max(0, blocks * block_size - window + 1) // block_size if window else 0
        spans.append((min(max(have, passed), blocks), blocks))
    return [*spans, (blocks - 1, blocks)] if states else spans

"""Which rank holds which part of the KV cache, on both sides, and the routes between them: pure arithmetic.

A replica's ranks hold parts of every block: some layers (their stage's) and some KV heads (their share, or one head
that several ranks replicate). Source and target may be sharded differently; the unit is (layer, block, head range).
"""

from collections.abc import Sequence
from itertools import pairwise

from msgspec import Struct

Span = tuple[int, int]  # [start, stop)


class RankShard(Struct, frozen=True):
    """One rank's part of each block: per cache group its layers, by index in the model, and a span of KV heads."""

    layers: tuple[tuple[int, ...], ...]
    heads: Span


class KvShards(Struct, frozen=True):
    """How blocks are sharded over a replica's ranks."""

    block_size: int
    head_dim: int
    dtype: str
    windows: tuple[int, ...]  # per cache group; 0 = all
    ranks: tuple[RankShard, ...]

    def layers_of(self, group: int) -> frozenset[int]:
        """All layers of a cache group, over the stages."""
        return frozenset(layer for rank in self.ranks for layer in rank.layers[group])

    @property
    def num_heads(self) -> int:
        return max(rank.heads[1] for rank in self.ranks)


class Route(Struct, frozen=True):
    """The part of every block that one source rank sends to one target rank: layers in order, a head span."""

    source: int
    target: int
    layers: tuple[tuple[int, ...], ...]  # per cache group
    heads: Span


def mismatch(source: KvShards, target: KvShards) -> str:
    """Why blocks of one cannot be used by the other, as a sentence; empty when they can."""
    if source.block_size != target.block_size:
        return f"blocks of {source.block_size} and of {target.block_size} tokens do not match"
    if (source.head_dim, source.dtype, source.num_heads) != (target.head_dim, target.dtype, target.num_heads):
        return "KV heads of different number, size or dtype do not match"
    if source.windows != target.windows:
        return "the layers' attention spans do not match"
    groups = range(len(source.windows))
    if any(source.layers_of(group) != target.layers_of(group) for group in groups):
        return "the stages group layers of different spans differently: use the same pp on both sides"
    if not (_holds_all_once(source) and _holds_all_once(target)):
        return "the ranks of a replica must hold each part of a block, in one stage"
    return ""


def plan_routes(source: KvShards, target: KvShards) -> list[Route]:
    """All routes, which together send every target rank its part of each block, each piece once.

    Ranks that replicate the same heads share the targets. Raises ValueError when the shards do not match.
    """
    sentence = mismatch(source, target)
    if sentence:
        raise ValueError(sentence)
    routes = []
    for number, wanted in enumerate(target.ranks):
        for holders in _stages(source):
            layers = _common(source.ranks[holders[0]].layers, wanted.layers)
            if any(layers):
                routes += [
                    Route(holder, number, layers, span)
                    for holder, span in _cover(source, holders, wanted.heads, number)
                ]
    return routes


def _stages(shards: KvShards) -> list[list[int]]:
    """Ranks by stage: those of a stage hold the same layers."""
    stages: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    for number, rank in enumerate(shards.ranks):
        stages.setdefault(rank.layers, []).append(number)
    return list(stages.values())


def _holds_all_once(shards: KvShards) -> bool:
    """Whether every layer is in one stage, and every stage has all heads; checked because a peer is not trusted."""
    stages = _stages(shards)
    layers = [layer for holders in stages for group in shards.ranks[holders[0]].layers for layer in group]
    return len(set(layers)) == len(layers) and all(_is_whole(shards, holders) for holders in stages)


def _is_whole(shards: KvShards, holders: list[int]) -> bool:
    spans = sorted(shards.ranks[rank].heads for rank in holders)
    joined = all(before[1] >= after[0] for before, after in pairwise(spans))
    return joined and (spans[0][0], max(stop for _, stop in spans)) == (0, shards.num_heads)


def _common(held: Sequence[tuple[int, ...]], wanted: Sequence[tuple[int, ...]]) -> tuple[tuple[int, ...], ...]:
    return tuple(
        tuple(layer for layer in mine if layer in set(yours)) for yours, mine in zip(held, wanted, strict=True)
    )


def _cover(shards: KvShards, holders: list[int], wanted: Span, turn: int) -> list[tuple[int, Span]]:
    """Holders and spans that cover the wanted heads."""
    pieces = []
    head, stop = wanted
    while head < stop:
        able = [rank for rank in holders if shards.ranks[rank].heads[0] <= head < shards.ranks[rank].heads[1]]
        chosen = able[turn % len(able)]
        end = min(stop, shards.ranks[chosen].heads[1])
        pieces.append((chosen, (head, end)))
        head = end
    return pieces


def wanted_blocks(windows: Sequence[int], block_size: int, have: int, blocks: int) -> list[Span]:
    """Per cache group, the span of the first `blocks` blocks that a replica with the first `have` of them needs.

    In a group with a window only those that a query right after them attends to.
    """
    spans = []
    for window in windows:
        passed = max(0, blocks * block_size - window + 1) // block_size if window else 0
        spans.append((min(max(have, passed), blocks), blocks))
    return spans

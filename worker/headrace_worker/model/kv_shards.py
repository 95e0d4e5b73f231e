"""How KV blocks are sharded over a replica's ranks, from the model's config: for transfers between replicas."""

from typing import Any

from headrace_worker.comm.parallel_context import ParallelContext
from headrace_worker.core.transfer.shards import GroupShard, KvGroup, KvShards, RankShard
from headrace_worker.model.cache_layout import cache_layout
from headrace_worker.model.isolated_rank import IsolatedRank


def kv_shards(config: Any, dtype: str, block_size: int, element_bytes: int, tp: int, pp: int) -> KvShards:
    """The shards of all ranks of a replica, in rank order, from a transformers text config; without their memory."""
    ranks = []
    layout = None
    for stage in range(pp):
        for place in range(tp):
            layout = cache_layout(
                config, block_size, element_bytes, ParallelContext(IsolatedRank(place, tp), stage, pp)
            )
            ranks.append(RankShard(tuple(GroupShard(group.layers, group.heads) for group in layout.groups)))
    assert layout is not None
    groups = []
    for group in layout.groups:
        sizes = (entry // group.num_kv_heads for entry in group.entries if entry)
        groups.append(KvGroup(group.window, tuple(block_size * size * element_bytes for size in sizes)))
    return KvShards(block_size, dtype, tuple(groups), tuple(ranks))

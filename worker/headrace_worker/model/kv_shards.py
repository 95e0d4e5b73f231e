"""How KV blocks are sharded over a replica's ranks, from the model's config: for transfers between replicas."""

from typing import Any

from headrace_worker.comm.parallel_context import ParallelContext
from headrace_worker.core.transfer.shards import GroupShard, KvGroup, KvShards, RankShard
from headrace_worker.model.cache_layout import cache_layout
from headrace_worker.model.isolated_rank import IsolatedRank
from headrace_worker.model.sharding.places import kv_span


def kv_shards(config: Any, dtype: str, block_size: int, element_bytes: int, tp: int, pp: int) -> KvShards:
    """The shards of all ranks of a replica, in rank order, from a transformers text config; without their memory."""
    ranks = []
    layout = None
    for stage in range(pp):
        for place in range(tp):
            parallel = ParallelContext(IsolatedRank(place, tp), stage, pp)
            layout = cache_layout(config, block_size, element_bytes, parallel)
            heads = kv_span(config, parallel)
            ranks.append(RankShard(tuple(GroupShard(group.layers, heads) for group in layout.groups)))
    assert layout is not None
    groups = [
        KvGroup(group.window, 2 * (block_size * group.head_dim * element_bytes,))  # keys, values
        for group in layout.groups
    ]
    return KvShards(block_size, dtype, tuple(groups), tuple(ranks))

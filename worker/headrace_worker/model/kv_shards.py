"""How KV blocks are sharded over a replica's ranks, from the model's config alone: for transfers between replicas."""

from typing import Any

from headrace_worker.comm.parallel_context import ParallelContext
from headrace_worker.core.transfer.shards import KvShards, RankShard
from headrace_worker.model.cache_layout import cache_layout
from headrace_worker.model.isolated_rank import IsolatedRank
from headrace_worker.model.sharding.places import kv_span


def kv_shards(config: Any, dtype: str, block_size: int, tp: int, pp: int) -> KvShards:
    """The shards of all ranks of a replica, in rank order, from a transformers text config."""
    ranks = []
    layout = None
    for stage in range(pp):
        for place in range(tp):
            parallel = ParallelContext(IsolatedRank(place, tp), stage, pp)
            layout = cache_layout(config, block_size, 1, parallel)
            ranks.append(RankShard(tuple(group.layers for group in layout.groups), kv_span(config, parallel)))
    assert layout is not None
    return KvShards(
        block_size=block_size,
        head_dim=layout.groups[0].head_dim,
        dtype=dtype,
        windows=tuple(group.window for group in layout.groups),
        ranks=tuple(ranks),
    )

"""Routes between replicas that are sharded differently: each target rank receives its part exactly once."""

from collections import Counter
from itertools import product
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headrace_proto.block_hash import BlockHasher, derive_key
from headrace_worker.core.kv.manager import KVManager, ModelScope
from headrace_worker.core.layout import CacheGroupSpec, CacheLayout
from headrace_worker.core.transfer.shards import KvGroup, KvShards, mismatch, plan_routes, wanted_blocks
from headrace_worker.model.kv_shards import kv_shards

SPLITS = list(product(range(1, 5), range(1, 4)))  # (tp, pp)
FULL, SLIDING = "full_attention", "sliding_attention"


def _shards(tp: int, pp: int, *, layers: int = 6, kv: int = 4, kinds: tuple[str, ...] = ()) -> KvShards:
    """The shards of a replica of such a model. Its query heads divide by every tp that is tried."""
    config = SimpleNamespace(
        model_type="llama",
        num_hidden_layers=layers,
        num_attention_heads=12 * kv,
        num_key_value_heads=kv,
        hidden_size=96 * kv,
        head_dim=8,
        sliding_window=8 if kinds else None,
        layer_types=[kinds[index % len(kinds)] for index in range(layers)] if kinds else None,
    )
    return kv_shards(config, "float32", 16, 4, tp, pp)


def _fits(tp: int, kv: int) -> bool:
    return kv >= tp or tp % kv == 0


def _assert_complete(source: KvShards, target: KvShards) -> None:
    routes = plan_routes(source, target)
    arrived: Counter[tuple[int, int, int, int]] = Counter()
    for route in routes:
        for group, (moved, held) in enumerate(zip(route.groups, source.ranks[route.source].groups, strict=True)):
            assert set(moved.layers) <= set(held.layers)
            assert not moved.layers or held.units[0] <= moved.units[0] < moved.units[1] <= held.units[1]
            for layer, unit in product(moved.layers, range(*moved.units)):
                arrived[route.target, group, layer, unit] += 1
    assert arrived == Counter(
        (number, index, layer, unit)
        for number, rank in enumerate(target.ranks)
        for index, group in enumerate(rank.groups)
        for layer, unit in product(group.layers, range(*group.units))
    )
    assert len({(route.source, route.target) for route in routes}) == len(routes)


@pytest.mark.parametrize("kv", [1, 2, 3, 4, 6, 8])
def test_every_head_of_every_layer_arrives_once_for_all_splits(kv: int) -> None:
    splits = [(tp, pp) for tp, pp in SPLITS if _fits(tp, kv)]
    assert len(splits) >= 9
    for source, target in product(splits, splits):
        _assert_complete(_shards(*source, kv=kv), _shards(*target, kv=kv))


def test_layers_that_do_not_divide_among_the_stages() -> None:
    for source, target in product(SPLITS, SPLITS):
        _assert_complete(_shards(*source, layers=5), _shards(*target, layers=5))


@pytest.mark.parametrize("kinds", [(SLIDING, FULL), (SLIDING, SLIDING, FULL), (SLIDING,)])
def test_windows_match_or_are_refused_with_a_reason(kinds: tuple[str, ...]) -> None:
    """With several stages a model's layers may be grouped differently: then blocks are not compatible."""
    matched = 0
    for source, target in product(SPLITS, SPLITS):
        left, right = (_shards(*split, kinds=kinds) for split in (source, target))
        if mismatch(left, right):
            assert source[1] != target[1], "the same stages hold the same groups"
            with pytest.raises(ValueError, match=r"do not match|differently"):
                plan_routes(left, right)
        else:
            matched += 1
            _assert_complete(left, right)
    assert matched >= len(SPLITS) ** 2 // 3


def test_equal_holders_share_the_targets() -> None:
    """tp 4 with one KV head: all four ranks hold it, and one of four targets reads from each."""
    one = _shards(4, 1, kv=1)
    assert sorted(route.source for route in plan_routes(one, one)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"block_size": 8}, "tokens"),
        ({"groups": (KvGroup(0, (1, 1)),)}, "size"),
        ({"dtype": "bfloat16"}, "dtype"),
        ({"groups": (KvGroup(8, (512, 512)),)}, "spans"),
        ({"groups": (KvGroup(0, (512, 512)),) * 2}, "spans"),
    ],
)
def test_other_layouts_are_refused(change: dict[str, Any], word: str) -> None:
    mine = _shards(1, 1)
    other = msgspec.structs.replace(mine, **change)
    for pair in ((mine, other), (other, mine)):
        assert word in mismatch(*pair)
        with pytest.raises(ValueError, match=word):
            plan_routes(*pair)


def test_other_heads_and_layers_are_refused() -> None:
    assert mismatch(_shards(1, 1, kv=4), _shards(1, 1, kv=2))
    assert mismatch(_shards(1, 1, layers=6), _shards(1, 1, layers=4))


@pytest.mark.parametrize("windows", [(0,), (8, 0), (5,), (16, 7), (1, 0)])
def test_wanted_blocks_are_those_of_the_next_query(windows: tuple[int, ...]) -> None:
    """With them and the held ones the cache finds the whole prefix; with one fewer it does not."""
    size = 4
    layout = CacheLayout(size, tuple(CacheGroupSpec(i, (i,), 1, 8, window) for i, window in enumerate(windows)), 4)
    scope = ModelScope("m", "r", "float32", "float32")
    for have, blocks in [(held, count) for count in range(1, 8) for held in range(count)]:
        spans = wanted_blocks(windows, size, have, blocks)
        assert all(have <= start <= stop == blocks for start, stop in spans)
        for left_out in [None, *((group, start) for group, (start, stop) in enumerate(spans) if start < stop)]:
            kv = KVManager(layout, 64, BlockHasher(derive_key(b"k")), scope)
            chain = kv.start_chain(b"", "")
            kv.extend_chain(chain, list(range(size * blocks)), blocks)
            for group, (start, stop) in enumerate(spans):
                for index in [*range(have), *range(start, stop)]:
                    if (group, index) != left_out:
                        kv.publish_blocks(chain, group, index, kv.pool.allocate(1))
            found = kv.lookup(chain, size * blocks).tokens
            assert found == size * blocks if left_out is None else found < size * blocks

"""A router predicts the cache hits of a replica: what it finds equals what the replica's KV manager finds."""

import random

import numpy as np
import pytest

from headrace_proto.block_hash import BlockHasher
from headrace_router.core import replica_blocks as prompt_blocks
from headrace_router.core.prefix_index import PrefixIndex, digests_of
from headrace_router.core.replica_blocks import GroupBlocks, HashScheme, PromptBlocks
from headrace_worker.core.kv.manager import KVManager, ModelScope
from headrace_worker.core.layout import CacheGroupSpec, CacheLayout
from headrace_worker.core.plan import Work

SIZE = 4


def manager(windows: tuple[int, ...], blocks: int, slots: int = 1) -> KVManager:
    groups = tuple(CacheGroupSpec(index, (index,), 1, 8, window) for index, window in enumerate(windows))
    scope = ModelScope("m", "r", "d", "d")
    return KVManager(CacheLayout(SIZE, groups, 1), blocks, BlockHasher(bytes(32)), scope, slots, rows=1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("windows", "slots"), [((0,), 1), ((0, 0), 1), ((9,), 1), ((0, 9), 1), ((5, 0, 14), 1), ((0,), 9), ((0, 9), 9)]
)
def test_it_equals_what_replicas_find(windows: tuple[int, ...], slots: int, seed: int) -> None:
    """slots: of recurrent state, whose snapshots are a group of their own."""
    chance = random.Random(seed)
    replicas = [manager(windows, 40 * len(windows), slots) for _ in range(3)]
    spans = windows if slots == 1 else (*windows, 2)
    index = PrefixIndex(1 << 14)
    places = [index.open() for _ in replicas]
    prompts: list[list[int]] = []
    hits = 0
    for _ in range(150):
        shared = chance.choice(prompts)[: chance.randrange(60)] if prompts else []
        prompt = shared + [chance.randrange(9) for _ in range(chance.randrange(1, 60))]
        prompts.append(prompt)
        chain = replicas[0].start_chain(b"", "")
        replicas[0].extend_chain(chain, prompt, len(prompt) // SIZE)
        blocks = PromptBlocks(
            SIZE,
            [GroupBlocks(w, digests_of(digests)) for w, digests in zip(spans, chain.digests, strict=True)],
        )
        limit = len(prompt) - 1
        found = [kv.lookup(chain, limit) for kv in replicas]
        assert blocks.cached_tokens(index, limit)[places].tolist() == [hit.tokens for hit in found]
        hits += sum(hit.tokens > 0 for hit in found)
        chosen = chance.randrange(3)
        kv = replicas[chosen]
        table = kv.new_table(found[chosen])
        if kv.states is not None:
            branch = found[chosen].covered // SIZE
            kv.states.begin(table.state, len(prompt), found[chosen].tokens, found[chosen].snapshot, branch)
        for end in range(found[chosen].tokens + SIZE, len(prompt) + 1, SIZE):
            assert kv.grow(table, 0, end - SIZE, end) is not None
            if kv.states is not None:
                kv.states.plan([Work(0, end - SIZE, SIZE, False)], [table.state])
            kv.publish(table, chain, prompt, end)
        kv.release(table)
        for change in kv.take_changes():
            (index.store if change.stored else index.remove)(places[chosen], digests_of([change.digest]))
    assert hits > 20


def test_of_recurrent_state_a_prompt_leaves_one_snapshot() -> None:
    """It is expected a block before the end of the prompt; keys and values are expected of every block."""
    scheme = HashScheme(bytes(32), "m", "r", "d", "d", 1, SIZE, (0, 2), states=True)
    for length, border in ((3, 0), (9, 1), (16, 2), (17, 3), (40, 8)):
        blocks = scheme.blocks(b"", list(range(length)))
        full, states = (group.digests.tolist() for group in blocks.groups)
        assert set(blocks.expected.tolist()) == {*full, *states[max(0, border - 1) : border]}
    blocks = scheme.blocks(b"", list(range(5 * prompt_blocks.MAX_EXPECTED)))
    full, states = (group.digests.tolist() for group in blocks.groups)
    most = prompt_blocks.MAX_EXPECTED
    assert set(blocks.expected.tolist()) == {*full[:most], states[most - 1]}, "the end of what is expected"


def test_a_prompt_without_a_full_block_hits_nothing() -> None:
    index = PrefixIndex(1 << 14)
    index.open()
    nothing = np.array([], np.uint64)
    for window in (0, 9):
        assert PromptBlocks(SIZE, [GroupBlocks(window, nothing)]).cached_tokens(index, 3).tolist() == [0]


def test_of_many_replicas_some_with_most_of_a_windowed_prompt_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one lookup may cost does not grow with replicas times blocks."""
    monkeypatch.setattr(prompt_blocks, "MAX_COVERED", 3 * 20)
    full, window = (np.arange(1, 21, dtype=np.uint64) + offset for offset in (0, 99))
    index = PrefixIndex(1 << 14)
    for number in range(10):
        slot, count = index.open(), 2 * number + 2
        index.store(slot, np.concatenate((full[:count], window[:count])))
    found = PromptBlocks(SIZE, [GroupBlocks(0, full), GroupBlocks(9, window)]).cached_tokens(index, 20 * SIZE)
    assert found.tolist() == [0] * 7 + [16 * SIZE, 18 * SIZE, 20 * SIZE]

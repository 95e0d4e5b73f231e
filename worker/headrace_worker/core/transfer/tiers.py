"""Pools of the device above the slots of host memory, and the longest prefix of a prompt over both. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_worker.core.kv.blocks import BlockPool
from headrace_worker.core.kv.manager import KVManager
from headrace_worker.core.request import Request
from headrace_worker.core.transfer.shards import wanted_blocks
from headrace_worker.core.transfer.slots import Slots

AHEAD = 0.25  # share of a pool that is free, or stored already and evicted next
AHEAD_STEPS = 4  # at least as many blocks as so many steps allocate: a copy takes two steps
MOST_AHEAD = 0.5  # largest share of the pool of KV blocks that AHEAD_STEPS may reach


@dataclass(slots=True)
class Tier:
    """A pool, and the slots of each rank's host memory for what the pool evicts: KV blocks, or snapshots of state."""

    pool: BlockPool
    slots: Slots
    ahead: int  # blocks of the pool that are to be free, or stored and evicted next
    size: float = 1.0  # size of a block of the pool, in KV blocks: determines the time of a copy

    @property
    def to_store(self) -> int:
        """Cached blocks that should be in host memory now."""
        pool = self.pool
        stored = pool.cached - pool.unstored
        return max(0, min(pool.unstored, self.ahead - pool.free - stored))


def make_tiers(kv: KVManager, blocks: Slots, states: Slots, step_tokens: int) -> list[Tier]:
    """Makes a tier for KV blocks, and a tier for snapshots of recurrent layers. step_tokens: most tokens of a step."""
    total = kv.pool.total
    steps = min(AHEAD_STEPS * kv.blocks_for(step_tokens), int(MOST_AHEAD * total))
    tiers = [Tier(kv.pool, blocks, max(int(AHEAD * total), steps))]
    if kv.states is not None:
        total = kv.states.pool.total
        steps = min(AHEAD_STEPS * kv.states.rows, total)  # each row may evict one snapshot in every step
        size = kv.state_blocks * len(kv.windows) or 1.0
        tiers.append(Tier(kv.states.pool, states, max(int(AHEAD * total), steps), size))
    for tier in tiers:
        if tier.slots.total:
            tier.pool.follow_unstored()
    return tiers


@dataclass(frozen=True, slots=True)
class Found:
    """A block of a prompt behind the pool's prefix of it, and where its content is."""

    group: int  # the one after those of KV blocks: snapshots
    index: int  # in the prompt
    block: int | None  # block of the pool
    slot: int | None  # slot of host memory
    place: int  # in the file; 0 = not there

    @property
    def in_file_alone(self) -> bool:
        return self.slot is None and self.block is None


def find_longest(
    kv: KVManager, tiers: Sequence[Tier], files: Slots, request: Request, have: int
) -> tuple[int, list[Found]]:
    """Blocks of the longest prefix that is in the pools, host memory and file, and those that the pools' prefix lacks.

    have: blocks of the pools' prefix. files: places of the file. The longest prefix of groups without a window, then
    shorter ones until there is a snapshot at the end, and those with a window have what its next query sees. Each block
    is looked up once; the snapshot is the last one found.
    """
    chain, state = request.chain, len(kv.windows)
    known: dict[tuple[int, int], Found | None] = {}

    def find(group: int, index: int) -> Found | None:
        key = group, index
        if key not in known:
            digest, tokens, tier = chain.digests[group][index], chain.packed[index], tiers[group == state]
            block = tier.pool.find(digest, tokens)
            slot = tier.slots.find(digest, tokens) if block is None else None
            place = files.find(digest, tokens) if block is None else None
            missing = block is None and slot is None and place is None
            known[key] = None if missing else Found(group, index, block, slot, place or 0)
        return known[key]

    blocks = (len(request.tokens) - 1) // kv.block_size
    for group, window in enumerate(kv.windows):
        reach = have
        while not window and reach < blocks and find(group, reach) is not None:
            reach += 1
        blocks = blocks if window else reach
    while blocks > have:
        if kv.states is not None and find(state, blocks - 1) is None:
            blocks -= 1
            continue
        spans = wanted_blocks(kv.windows, kv.block_size, have, blocks, states=kv.states is not None)
        seen = [(group, index) for group, window in enumerate(kv.windows) if window for index in range(*spans[group])]
        missing = [index for group, index in seen if find(group, index) is None]
        if not missing:
            wanted = [(group, index) for group, span in enumerate(spans) for index in range(*span)]
            return blocks, [found for key in wanted if (found := find(*key)) is not None]
        blocks = min(missing)  # every shorter prefix that is longer than this needs it, too
    return have, []

"""Block tables of requests, per cache group, and prefix cache lookups."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace_proto.block_hash import BlockHasher, CacheScope, pack_tokens
from headrace_worker.core.kv.blocks import NULL_BLOCK, BlockPool, CacheChange, Content
from headrace_worker.core.kv.states import RequestState, StateSlots
from headrace_worker.core.layout import LAYOUT_VERSION, CacheLayout
from headrace_worker.core.plan import TableUpdate


@dataclass(frozen=True, slots=True)
class ModelScope:
    """The part of a block's identity that is the same for all requests of a replica."""

    model: str
    revision: str
    dtype: str
    kv_dtype: str


@dataclass(slots=True)
class PrefixChain:
    """Hashes and packed tokens of a request's full blocks, extended as tokens become known."""

    roots: tuple[bytes, ...]  # per group; the last one is of snapshots of recurrent state, where there are some
    digests: tuple[list[bytes], ...]  # per group, as long as the number of full blocks hashed so far
    packed: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class BlockTable:
    """The blocks that one request holds: `tables[group][i]` covers positions [i * block_size, (i + 1) * block_size)."""

    tables: tuple[list[int], ...]
    passed: list[int]  # per group: leading entries that the window has moved past
    capacity: int = 0  # positions covered, the same in every group
    published: int = 0  # leading blocks whose contents are published
    unpublished_end: int = 0  # positions to compute before another block can be published
    state: RequestState = field(default_factory=RequestState)

    def held(self) -> list[int]:
        """All blocks held, in table order."""
        return [block for table in self.tables for block in table if block != NULL_BLOCK]


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached blocks that a request can start from: `tokens` positions need no computation."""

    tokens: int
    tables: tuple[list[int], ...]
    snapshot: int = 0  # slot with the recurrent state after them
    covered: int = 0  # positions whose keys and values are cached: without a snapshot they are of no use

    def held(self) -> list[int]:
        return [block for table in self.tables for block in table if block != NULL_BLOCK]


class KVManager:
    """Allocates, shares and publishes blocks. One pool for all groups; no tensors here."""

    def __init__(
        self,
        layout: CacheLayout,
        num_blocks: int,
        hasher: BlockHasher,
        scope: ModelScope,
        state_slots: int = 1,
        rows: int = 0,
    ) -> None:
        """state_slots: slot 0 included; 1 for a model without recurrent layers. rows: requests that run at a time."""
        self.pool = BlockPool(num_blocks)
        self.states = StateSlots(state_slots, rows, layout.block_size) if state_slots > 1 else None
        self.block_size = layout.block_size
        self.windows = tuple(group.window for group in layout.groups)
        # In blocks of all groups: what a transfer of a state takes beside that of blocks.
        block_bytes = layout.block_bytes * len(layout.groups)
        self.state_blocks = layout.state_bytes / block_bytes if block_bytes and self.states is not None else 0.0
        self._hasher = hasher
        self._scope = scope
        self._groups = len(layout.groups)
        self._windowed = any(self.windows)

    def start_chain(self, tenant_salt: bytes, adapter: str) -> PrefixChain:
        """An empty chain for a request of this tenant and adapter. Thread-safe."""
        scope = self._scope
        roots = tuple(
            self._hasher.root(
                CacheScope(
                    tenant_salt=tenant_salt,
                    model=scope.model,
                    revision=scope.revision,
                    adapter=adapter,
                    dtype=scope.dtype,
                    kv_dtype=scope.kv_dtype,
                    layout_version=LAYOUT_VERSION,
                    block_size=self.block_size,
                    group=group,
                )
            )
            for group in range(self._groups + (self.states is not None))
        )
        return PrefixChain(roots, tuple([] for _ in roots))

    def extend_chain(self, chain: PrefixChain, token_ids: Sequence[int], blocks: int) -> None:
        """Hashes those of the first `blocks` full blocks of `token_ids` that are not in the chain. Thread-safe."""
        size = self.block_size
        for index in range(len(chain.packed), blocks):
            tokens = token_ids[index * size : (index + 1) * size]
            chain.packed.append(pack_tokens(tokens))
            for root, digests in zip(chain.roots, chain.digests, strict=True):
                digests.append(self._hasher.block(digests[-1] if digests else root, tokens))

    def lookup(self, chain: PrefixChain, limit: int) -> PrefixHit:
        """The longest cached prefix of at most `limit` positions. Acquires no blocks."""
        most = min(limit // self.block_size, len(chain.packed))
        found: list[list[int | None]] = []
        for group, window in enumerate(self.windows):
            row: list[int | None] = []
            for index in range(most):
                block = self.pool.find(chain.digests[group][index], chain.packed[index])
                if block is None and window == 0:
                    most = index
                    break
                row.append(block)
            found.append(row)
        windowed = [(found[group], window) for group, window in enumerate(self.windows) if window]
        most = self._longest(windowed, most)
        covered, snapshot = most, 0
        while self.states is not None and most > 0:
            snapshot = self.states.pool.find(chain.digests[-1][most - 1], chain.packed[most - 1]) or 0
            reach = self._longest(windowed, most) if snapshot else most - 1
            if reach == most:
                break
            most, snapshot = reach, 0
        tables = []
        for group, window in enumerate(self.windows):
            passed = self._passed(most * self.block_size, window)
            tables.append([NULL_BLOCK] * passed + [b for b in found[group][passed:most] if b is not None])
        return PrefixHit(most * self.block_size, tuple(tables), snapshot, covered * self.block_size)

    def new_table(self, hit: PrefixHit) -> BlockTable:
        """Starts a request's table from a current hit: acquires its blocks."""
        for block in hit.held():
            self.pool.acquire(block)
        return BlockTable(
            tables=tuple(list(table) for table in hit.tables),
            passed=[self._passed(hit.tokens, window) for window in self.windows],
            capacity=hit.tokens,
            published=hit.tokens // self.block_size,
            unpublished_end=hit.tokens + self.block_size,
        )

    def blocks_for(self, positions: int) -> int:
        """Maximum number of blocks for a request of so many positions, if its prompt is computed in one chunk."""
        return self._groups * -(-positions // self.block_size)

    def cost_of(self, hit: PrefixHit, positions: int) -> int:
        """Available blocks that are taken when a request starts from `hit` and grows to `positions`."""
        taken = sum(1 for block in hit.held() if self.pool.is_cached(block))
        return taken + self._groups * max(0, -(-positions // self.block_size) - hit.tokens // self.block_size)

    def grow(self, table: BlockTable, row: int, start: int, end: int) -> list[TableUpdate] | None:
        """Allocates blocks for positions up to `end`, [start, end) of which are computed next. None: too few free.

        Blocks that no query at or after `start` attends to are released first.
        """
        if end <= table.capacity:
            return []
        if self._windowed:
            self._pass_windows(table, start)
        first = table.capacity // self.block_size
        count = -(-end // self.block_size) - first
        if count * self._groups > self.pool.available:
            return None
        updates = []
        for group, blocks in enumerate(table.tables):
            fresh = self.pool.allocate(count)
            blocks.extend(fresh)
            updates.append(TableUpdate(group, row, first, fresh))
        table.capacity += count * self.block_size
        return updates

    def publish(self, table: BlockTable, chain: PrefixChain, token_ids: Sequence[int], computed: int) -> None:
        """Publishes all full blocks of the first `computed` positions. Their tokens must be known."""
        full = computed // self.block_size
        if full <= table.published:
            return
        self.extend_chain(chain, token_ids, full)
        if self.states is not None:
            for border in [border for border in table.state.kept if border <= full]:
                content = Content(self._groups, chain.digests[-1][border - 1], chain.packed[border - 1])
                self.states.publish(table.state, border, content)
        for group, blocks in enumerate(table.tables):
            digests = chain.digests[group]
            for index in range(table.published, full):
                if blocks[index] != NULL_BLOCK:
                    self.pool.publish(blocks[index], Content(group, digests[index], chain.packed[index]))
        table.published = full
        table.unpublished_end = (full + 1) * self.block_size

    def take_changes(self) -> list[CacheChange]:
        """Changes of the index since the last call, in order for each group."""
        return self.pool.take_changes() + (self.states.pool.take_changes() if self.states is not None else [])

    def publish_blocks(self, chain: PrefixChain, group: int, first: int, blocks: Sequence[int]) -> None:
        """Publishes held blocks that contain the chain's blocks from `first` on, of one group."""
        for index, block in enumerate(blocks, first):
            self.pool.publish(block, Content(group, chain.digests[group][index], chain.packed[index]))

    def publish_state(self, chain: PrefixChain, blocks: int, slot: int, prompt_len: int) -> None:
        """Publishes a held slot with the state after so many of the chain's blocks."""
        assert self.states is not None
        content = Content(self._groups, chain.digests[-1][blocks - 1], chain.packed[blocks - 1])
        self.states.publish_read(slot, content, prompt_len)

    def forget(self, table: BlockTable, chain: PrefixChain) -> None:
        """Removes the contents of a request's blocks and states from the index: no other request starts from them."""
        for blocks in table.tables:
            for block in blocks:
                self.pool.forget(block)
        if self.states is not None:
            for digest in chain.digests[-1]:
                self.states.pool.discard(digest)

    def release(self, table: BlockTable) -> None:
        """Releases all blocks of a request; published ones stay cached until they are evicted."""
        for blocks in table.tables:
            self.pool.release(blocks)
            blocks.clear()
        if self.states is not None:
            self.states.release(table.state)
        table.capacity = 0
        table.published = 0
        table.unpublished_end = self.block_size
        table.passed = [0] * self._groups

    def _pass_windows(self, table: BlockTable, start: int) -> None:
        for group, window in enumerate(self.windows):
            passed = self._passed(start, window)
            before = table.passed[group]
            if passed > before:
                blocks = table.tables[group]
                self.pool.release(blocks[before:passed])
                blocks[before:passed] = [NULL_BLOCK] * (passed - before)
                table.passed[group] = passed

    def _passed(self, position: int, window: int) -> int:
        """Number of leading blocks that no query at or after `position` attends to."""
        return max(0, position - window + 1) // self.block_size if window else 0

    def _longest(self, windowed: Sequence[tuple[list[int | None], int]], blocks: int) -> int:
        """The longest prefix of at most so many blocks of which all that the next query attends to were found.

        windowed: the blocks that were found, and the window, of each group that has one.
        """
        while blocks > 0:
            spans = [(row, self._passed(blocks * self.block_size, window)) for row, window in windowed]
            missing = [index for row, first in spans for index in range(first, blocks) if row[index] is None]
            if not missing:
                break
            blocks = min(missing)  # every shorter prefix that is longer than this needs it, too
        return blocks

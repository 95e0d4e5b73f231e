"""Blocks that are about to be evicted go to host memory, and come back by prefix hits. Pure.

    cached, evicted next ── Store ─▶ in a slot of host memory ── a prompt begins with it ── Load ─▶ published again

Both are copies within each rank, ordered like reads of other replicas' blocks and reported alike. A slot is pinned
while it is copied; what was copied of a block that was evicted meanwhile is dropped. A load only fills the prefix
cache: its request is queued afterwards.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace_worker.core.kv.blocks import CacheChange, Content
from headrace_worker.core.kv.manager import BlockTable, KVManager
from headrace_worker.core.request import Request
from headrace_worker.core.transfer.orders import ChunkRead, Load, Order, Store
from headrace_worker.core.transfer.shards import wanted_blocks

FIRST_NUMBER = 1 << 32  # in orders and reports: those of fetches from other replicas are lower


@dataclass(frozen=True, slots=True)
class OffloadLimits:
    ahead: float = 0.25  # share of the pool that is free, or stored already and evicted next
    ahead_steps: int = 4  # so many steps of prompts at least: a copy takes two
    most_ahead: float = 0.5  # of the pool
    batch: int = 128  # blocks of one order
    min_blocks: int = 2  # fewer are computed
    watermark: float = 0.05  # share of the pool that loads leave to running requests
    rest: float = 10.0  # seconds without stores after one that failed
    speed_older: float = 0.8  # weight of earlier loads beside the newest one, in what a block takes


@dataclass(slots=True)
class OffloadCounters:
    """Monotonic."""

    stored: int = 0  # blocks
    loaded: int = 0
    load_seconds: float = 0.0


class HostSlots:
    """Which content each slot of host memory has; least recently used first. Slot 0 does not exist."""

    def __init__(self, slots: int) -> None:
        self.total = slots
        self._free = list(range(slots, 0, -1))
        self._by_digest: OrderedDict[bytes, tuple[int, Content]] = OrderedDict()
        self._pins: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._by_digest)

    def find(self, digest: bytes, tokens: bytes) -> int | None:
        """The slot with this content, which counts as used. The tokens are compared, not the hash alone."""
        found = self._by_digest.get(digest)
        if found is None or found[1].tokens != tokens:
            return None
        self._by_digest.move_to_end(digest)
        return found[0]

    def __contains__(self, digest: object) -> bool:
        return digest in self._by_digest

    def take(self) -> tuple[int, Content | None] | None:
        """A slot to fill, pinned, and the content that it had; None if all are pinned."""
        if self._free:
            slot = self._free.pop()
            self.pin(slot)
            return slot, None
        for digest, (slot, content) in self._by_digest.items():
            if slot not in self._pins:
                del self._by_digest[digest]
                self.pin(slot)
                return slot, content
        return None

    def put(self, slot: int, content: Content) -> None:
        """The slot has this content now."""
        self._by_digest[content.digest] = slot, content

    def give_back(self, slot: int) -> None:
        """A slot that was taken has no content."""
        self._free.append(slot)

    def pin(self, slot: int) -> None:
        self._pins[slot] = self._pins.get(slot, 0) + 1

    def unpin(self, slot: int) -> None:
        self._pins[slot] -= 1
        if not self._pins[slot]:
            del self._pins[slot]


@dataclass(slots=True)
class _Storing:
    entries: list[tuple[int, int, Content]]  # block, slot, content
    missing: set[int]  # ranks
    failed: bool = False


@dataclass(slots=True)
class _Loading:
    request: Request | None  # None: it has ended
    held: BlockTable
    entries: list[tuple[int, int, int, int]]  # cache group, index in the prompt, slot, block
    missing: set[int]
    began: float
    failed: bool = False


@dataclass(slots=True)
class Offload:
    """Of one engine. Not thread-safe: the step loop owns it."""

    kv: KVManager
    ranks: int
    slots: HostSlots
    step_tokens: int  # that a step computes at most
    clock: Callable[[], float]
    limits: OffloadLimits = OffloadLimits()
    counters: OffloadCounters = field(default_factory=OffloadCounters)
    orders: list[Order] = field(default_factory=list)
    block_seconds: float = 0.0  # of a load, as measured; 0 = not yet
    _storing: dict[int, _Storing] = field(default_factory=dict)
    _loading: dict[int, _Loading] = field(default_factory=dict)
    _ready: list[Request] = field(default_factory=list)
    _dropped: list[CacheChange] = field(default_factory=list)
    _rest_until: float = 0.0
    _number: int = FIRST_NUMBER

    @property
    def waiting(self) -> int:
        """Requests that are queued later."""
        return len(self._loading) + len(self._ready)

    @property
    def busy(self) -> bool:
        """Whether `tick` must be called."""
        return bool(self._storing or self._loading or self._ready or self._next())

    @property
    def has_ready(self) -> bool:
        """Whether a request waits to be queued."""
        return bool(self._ready)

    def tick(self) -> list[Request]:
        """Stores what is evicted next; returns the requests to queue now."""
        if not self._storing:
            self._store(self._next())
        ready, self._ready = self._ready, []
        return ready

    def begin(self, request: Request, seconds_per_token: float, queued: int) -> bool:
        """Starts a load if a longer prefix is here than in the pool, and copying it is faster than computing it."""
        kv = self.kv
        most = (len(request.tokens) - 1) // kv.block_size
        kv.extend_chain(request.chain, request.tokens, most)
        hit = kv.lookup(request.chain, len(request.tokens) - 1)
        have = hit.tokens // kv.block_size
        blocks, entries = self._longest(request, have, most)
        if blocks - have < self.limits.min_blocks:
            return False
        local_seconds = ((blocks - have) * kv.block_size + queued) * seconds_per_token
        if 0 < local_seconds <= (blocks - have) * self.block_seconds:
            return False
        held = kv.new_table(hit)
        if len(entries) + int(kv.pool.total * self.limits.watermark) > kv.pool.available:
            kv.release(held)
            return False
        fresh = kv.pool.allocate(len(entries))
        filled = [(group, index, slot, block) for (group, index, slot), block in zip(entries, fresh, strict=True)]
        for _, _, slot, _ in filled:
            self.slots.pin(slot)
        self._number += 1
        self._loading[self._number] = _Loading(request, held, filled, set(range(self.ranks)), self.clock())
        self.orders.append(Load(self._number, self._by_group(filled, 2), self._by_group(filled, 3)))
        return True

    def cancel(self, request: Request) -> bool:
        """The request has ended. Returns whether it was here."""
        if request in self._ready:
            self._ready.remove(request)
            return True
        for loading in self._loading.values():
            if loading.request is request:
                loading.request = None
                return True
        return False

    def handle_report(self, report: ChunkRead) -> None:
        """A rank has copied its part of a load or a store."""
        if (storing := self._storing.get(report.fetch)) is not None:
            storing.missing.discard(report.rank)
            storing.failed = storing.failed or not report.good
            if not storing.missing:
                del self._storing[report.fetch]
                self._stored(storing)
        elif (loading := self._loading.get(report.fetch)) is not None:
            loading.missing.discard(report.rank)
            loading.failed = loading.failed or not report.good
            if not loading.missing:
                del self._loading[report.fetch]
                self._loaded(loading)

    def changes(self, changes: list[CacheChange]) -> list[CacheChange]:
        """What the pool's changes mean for others: a block counts as cached until it has left this tier, too."""
        dropped, self._dropped = self._dropped, []
        left = [change for change in dropped if not self.kv.pool.has(change.digest)]
        return [change for change in changes if change.stored or change.digest not in self.slots] + left

    def held(self) -> list[int]:
        """Blocks that loads hold."""
        return [b for each in self._loading.values() for b in (*each.held.held(), *(e[3] for e in each.entries))]

    # -- internal ---------------------------------------------------------------------------------------------

    def _next(self) -> list[tuple[int, Content]]:
        """Blocks to store: those that are evicted next, while few are free."""
        pool = self.kv.pool
        if not self.slots.total or self.clock() < self._rest_until:
            return []
        limits = self.limits
        steps = limits.ahead_steps * self.kv.blocks_for(self.step_tokens)
        ahead = max(int(limits.ahead * pool.total), min(steps, int(limits.most_ahead * pool.total)))
        count = min(ahead - pool.free, self.slots.total, limits.batch)
        return [each for each in pool.oldest(max(0, count)) if each[1].digest not in self.slots]

    def _store(self, oldest: Sequence[tuple[int, Content]]) -> None:
        entries = []
        for block, content in oldest:
            taken = self.slots.take()
            if taken is None:
                break
            slot, before = taken
            if before is not None:
                self._dropped.append(CacheChange(before.group, before.digest, False))
            entries.append((block, slot, content))
        if entries:
            self._number += 1
            self._storing[self._number] = _Storing(entries, set(range(self.ranks)))
            filled = [(content.group, 0, slot, block) for block, slot, content in entries]
            self.orders.append(Store(self._number, self._by_group(filled, 3), self._by_group(filled, 2)))

    def _stored(self, storing: _Storing) -> None:
        if storing.failed:
            self._rest_until = self.clock() + self.limits.rest
        for block, slot, content in storing.entries:
            if self.kv.pool.still_has(block, content) and not storing.failed:  # else it was evicted meanwhile
                self.slots.put(slot, content)
                self.counters.stored += 1
            else:
                self.slots.give_back(slot)
            self.slots.unpin(slot)

    def _longest(self, request: Request, have: int, most: int) -> tuple[int, list[tuple[int, int, int]]]:
        """Blocks of the longest prefix that is in the pool and here, and what is to be loaded: (group, index, slot)."""
        kv, chain = self.kv, request.chain
        for blocks in range(self._reach(request, have, most), have, -1):
            entries = []
            for group, (start, stop) in enumerate(wanted_blocks(kv.windows, kv.block_size, have, blocks)):
                for index in range(start, stop):
                    digest, tokens = chain.digests[group][index], chain.packed[index]
                    slot = self.slots.find(digest, tokens)
                    if slot is None:
                        break
                    entries.append((group, index, slot))
                else:
                    continue
                break
            else:
                return blocks, entries
        return have, []

    def _reach(self, request: Request, have: int, most: int) -> int:
        """Blocks of the longest prefix, as far as groups without a window decide."""
        chain, reach = request.chain, most
        for group, window in enumerate(self.kv.windows):
            index = have
            while not window and index < reach and chain.digests[group][index] in self.slots:
                index += 1
            reach = reach if window else index
        return reach

    def _loaded(self, loading: _Loading) -> None:
        kv = self.kv
        for group, index, slot, block in loading.entries:
            if loading.request is not None and not loading.failed:
                kv.publish_blocks(loading.request.chain, group, index, [block])
            self.slots.unpin(slot)
        kv.pool.release([entry[3] for entry in loading.entries])
        kv.release(loading.held)
        seconds = self.clock() - loading.began
        self.counters.loaded += len(loading.entries)
        self.counters.load_seconds += seconds
        per_block = seconds / len(loading.entries)
        older = self.limits.speed_older if self.block_seconds else 0.0
        self.block_seconds = older * self.block_seconds + (1 - older) * per_block
        if loading.request is not None:
            self._ready.append(loading.request)

    def _by_group(self, entries: Sequence[tuple[int, int, int, int]], place: int) -> tuple[tuple[int, ...], ...]:
        groups = range(len(self.kv.windows))
        return tuple(tuple(entry[place] for entry in entries if entry[0] == group) for group in groups)

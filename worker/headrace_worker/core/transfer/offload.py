"""What is about to be evicted goes to host memory, blocks on to a file, and comes back by prefix hits. Pure.

    cached, evicted next ── Store ─▶ slot of host memory ── Save, soon ─▶ place in the file
    published again      ◀─ Load ─── slot of host memory ◀─ Fill ──────── place in the file

Each is done within each rank, ordered like reads of other replicas' blocks and reported alike. A slot or a place is
pinned meanwhile; what was copied of a block that was evicted meanwhile is dropped. A load only fills the prefix cache:
its request is queued afterwards. Snapshots of recurrent state are blocks of one more cache group, with a pool and slots
of their own (`tiers.py`): they are stored and loaded alike, in the same orders, but not saved.

Every block in host memory is saved while the file is idle, so that a replica which starts again finds it.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace_worker.core.kv.blocks import CacheChange, Content
from headrace_worker.core.kv.manager import BlockTable, KVManager
from headrace_worker.core.request import Request
from headrace_worker.core.transfer.orders import ChunkRead, Erase, FileBlock, Fill, Load, Order, Save, Store
from headrace_worker.core.transfer.slots import Pace, Slots
from headrace_worker.core.transfer.tiers import Found, Tier, find_longest

Numbers = tuple[tuple[int, ...], ...]  # by cache group
FIRST_NUMBER = 1 << 32  # in orders and reports: those of fetches from other replicas are lower


@dataclass(frozen=True, slots=True)
class OffloadLimits:
    batch: int = 1024  # blocks of one order
    saves: int = 128  # blocks of one order that writes to the file
    steps: int = 2  # that an order and its reports wait for
    least_seconds: float = 2.0  # that a load may take; and so many times what computing its tokens would take
    slowdown: float = 4.0
    changes: int = 4096  # that are told to routers at once
    min_blocks: int = 2  # fewer are computed
    watermark: float = 0.05  # share of the pool that loads leave to running requests
    rest: float = 10.0  # seconds without stores, or saves, after one that failed


@dataclass(slots=True)
class OffloadCounters:
    """Monotonic."""

    stored: int = 0  # blocks and snapshots, in host memory
    loaded: int = 0
    load_seconds: float = 0.0
    saved: int = 0  # blocks, in the file
    filled: int = 0


@dataclass(slots=True)
class _Storing:
    entries: list[tuple[int, int, Content]]  # block, slot, content
    missing: set[int]  # ranks
    failed: bool = False
    seconds: float = 0.0  # time of the slowest rank


@dataclass(slots=True)
class _Saving:
    entries: list[tuple[int, int, Content]]  # slot, place, content
    missing: set[int]
    failed: bool = False
    seconds: float = 0.0


@dataclass(slots=True)
class _Filling:
    waiting: "_Waiting"
    pinned: list[int]  # slots with blocks of the same prompt
    entries: list[tuple[int, int, Content]]  # slot, place, content
    missing: set[int]
    failed: bool = False
    seconds: float = 0.0
    bad: set[int] = field(default_factory=set)  # places


@dataclass(slots=True)
class _Loading:
    waiting: "_Waiting"
    held: BlockTable
    shared: list[tuple[int, int]]  # cache group and block: of the pools, with contents of the prompt behind `held`
    entries: list[tuple[int, int, Content]]  # block, slot, content
    tokens: int  # tokens of the KV blocks among the entries
    missing: set[int]
    failed: bool = False
    seconds: float = 0.0


@dataclass(slots=True)
class _Waiting:
    """A request that is queued once its blocks are loaded."""

    request: Request | None  # None: it has ended
    since: float
    limit: float  # seconds; then it is queued without what is missing
    seconds: float = 0.0  # time of the request's copies from the file


@dataclass(slots=True)
class Offload:
    """Moves blocks of one engine to host memory and file, and back. Not thread-safe: the step loop owns it."""

    kv: KVManager
    ranks: int
    tiers: list[Tier]  # a tier for KV blocks, and one for snapshots where there are some
    files: Slots  # places for KV blocks in the ranks' files, which are the same in all
    clock: Callable[[], float]
    step_seconds: Callable[[], float]  # duration of the newest step; 0 = not known
    limits: OffloadLimits = OffloadLimits()
    counters: OffloadCounters = field(default_factory=OffloadCounters)
    orders: list[Order] = field(default_factory=list)
    load_pace: Pace = field(init=False)  # pace per block, from host memory
    fill_pace: Pace = field(init=False)  # pace per block, from the file to host memory
    token_pace: Pace = field(init=False)  # pace per token, by either or both copies
    _copying: dict[int, _Storing | _Saving | _Filling | _Loading] = field(default_factory=dict)
    _unsaved: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # in host memory, and not in the file
    _ready: list[Request] = field(default_factory=list)
    _changes: list[CacheChange] = field(default_factory=list)
    _rest_until: float = 0.0
    _saves_rest_until: float = 0.0
    _number: int = FIRST_NUMBER

    def __post_init__(self) -> None:
        self.load_pace, self.fill_pace, self.token_pace = (Pace(self.clock) for _ in range(3))
        self._changes += [CacheChange(each.group, each.digest, False, True) for each in self.files.contents()]

    @property
    def empty(self) -> bool:
        """Whether nothing can be loaded."""
        return not self.files and not any(tier.slots for tier in self.tiers)

    @property
    def waiting(self) -> int:
        """Requests that are queued later."""
        return len(self._requests()) + len(self._ready)

    @property
    def busy(self) -> bool:
        """Whether `tick` must be called."""
        outdated = any(tier.pool.has_outdated for tier in self.tiers)
        return bool(self._copying or self._ready or self._can_save or outdated or any(self._to_store()))

    @property
    def has_ready(self) -> bool:
        """Whether a request waits to be queued."""
        return bool(self._ready)

    def tick(self) -> list[Request]:
        """Stores what is evicted next; returns the requests to queue now."""
        for tier in self.tiers:
            forgotten, superseded = tier.pool.take_outdated()
            for digest in forgotten:
                self._drop(tier, digest)
            for digest in superseded:
                tier.slots.evict_next(digest)
        now = self.clock()
        for waiting in self._requests():
            if waiting.request is not None and now - waiting.since > waiting.limit:  # its copies go on
                self._ready.append(waiting.request)
                waiting.request = None
        under_way = {type(each) for each in self._copying.values()}
        if _Storing not in under_way:
            self._store()
        if _Saving not in under_way and self._can_save:
            self._save()
        ready, self._ready = self._ready, []
        return ready

    def begin(self, request: Request, seconds_per_token: float, queued: int) -> bool:
        """Starts a load if a longer prefix is here than in the pool, and copying it is faster than computing it."""
        kv = self.kv
        kv.extend_chain(request.chain, request.tokens, (len(request.tokens) - 1) // kv.block_size)
        have = kv.lookup(request.chain, len(request.tokens) - 1).tokens // kv.block_size
        blocks, entries = find_longest(kv, self.tiers, self.files, request, have)
        if blocks - have < self.limits.min_blocks:
            return False
        filed = sum(entry.in_file_alone for entry in entries)
        local_seconds = ((blocks - have) * kv.block_size + queued) * seconds_per_token
        size = sum(self._tier(entry.group).size for entry in entries if entry.block is None)
        copies = size * self.load_pace.seconds + filed * self.fill_pace.seconds
        waits = self.limits.steps * (1 + bool(filed)) * self.step_seconds() if copies else 0.0
        if 0 < local_seconds <= copies + waits:
            return False
        limit = max(self.limits.least_seconds, self.limits.slowdown * local_seconds)
        waiting = _Waiting(request, self.clock(), limit)
        if filed:
            return self._fill(waiting, entries)
        return self._load(waiting, entries)

    def cancel(self, request: Request) -> bool:
        """The request has ended. Returns whether it was here."""
        if request in self._ready:
            self._ready.remove(request)
            return True
        for waiting in self._requests():
            if waiting.request is request:
                waiting.request = None
                return True
        return False

    def handle_report(self, report: ChunkRead) -> None:
        """A rank has done its part of an order."""
        copy = self._copying.get(report.fetch)
        if copy is None:
            return
        copy.missing.discard(report.rank)
        copy.failed = copy.failed or not report.good
        copy.seconds = max(copy.seconds, report.seconds)
        if isinstance(copy, _Filling):
            copy.bad.update(report.bad)
        if copy.missing:
            return
        del self._copying[report.fetch]
        match copy:
            case _Storing():
                self._stored(copy)
            case _Saving():
                self._saved(copy)
            case _Filling():
                self._filled(copy)
            case _Loading():
                self._loaded(copy)

    def changes(self, changes: list[CacheChange]) -> list[CacheChange]:
        """What the pool's changes and those of host memory and the file mean together, in order."""
        most = self.limits.changes
        own, self._changes = self._changes[:most], self._changes[most:]
        own = [change for change in own if not self._tier(change.group).pool.has(change.digest)]
        return [
            change if change.stored else change._replace(offloaded=self._has(change.digest))
            for change in (*changes, *own)
        ]

    def held(self) -> list[int]:
        """KV blocks that loads hold."""
        held = [block for each in self._loads() for block in each.held.held()]
        return held + [block for group, block in self._held() if group < len(self.kv.windows)]

    def held_slots(self) -> list[int]:
        """Slots of recurrent state that loads hold."""
        return [slot for group, slot in self._held() if group == len(self.kv.windows)]

    # -- internal ---------------------------------------------------------------------------------------------

    def _loads(self) -> list[_Loading]:
        return [each for each in self._copying.values() if isinstance(each, _Loading)]

    def _held(self) -> list[tuple[int, int]]:
        """Cache group and block, beside those of the tables."""
        loaded = [(content.group, block) for each in self._loads() for block, _, content in each.entries]
        return loaded + [entry for each in self._loads() for entry in each.shared]

    def _to_store(self) -> list[int]:
        """How many blocks of each tier should be copied to host memory now."""
        if self.clock() < self._rest_until:
            return [0 for _ in self.tiers]
        counts, pool, limits = [tier.to_store for tier in self.tiers], self.kv.pool, self.limits
        if self.files.total and not pool.used and not self._unsaved:
            # Nothing runs: what is never evicted, such as a system prompt, is in the file after a restart, too.
            counts[0] = max(counts[0], min(pool.unstored, limits.saves))
        return [min(count, tier.slots.total, limits.batch) for tier, count in zip(self.tiers, counts, strict=True)]

    @property
    def _can_save(self) -> bool:
        return bool(self.files.total and self._unsaved and self.clock() >= self._saves_rest_until)

    def _requests(self) -> list[_Waiting]:
        return [each.waiting for each in self._copying.values() if isinstance(each, _Filling | _Loading)]

    def _has(self, digest: bytes) -> bool:
        return digest in self.files or any(digest in tier.slots for tier in self.tiers)

    def _begin(self, copy: _Storing | _Saving | _Filling | _Loading) -> int:
        self._number += 1
        self._copying[self._number] = copy
        return self._number

    def _take_slot(self, slots: Slots) -> int | None:
        taken = slots.take()
        if taken is None:
            return None
        slot, before = taken
        if before is not None:
            self._unsaved.pop(before.digest, None)
            self._left(before)
        return slot

    def _left(self, content: Content) -> None:
        """A content is not where it was."""
        self._changes.append(CacheChange(content.group, content.digest, False))

    def _drop(self, tier: Tier, digest: bytes) -> None:
        """A content is in doubt, or a newer one replaces it: it is not loaded again."""
        self._unsaved.pop(digest, None)
        for holder in (tier.slots, self.files):
            if digest in holder:
                place, content = holder.at(digest)
                holder.drop(digest)
                self._left(content)
                if holder is self.files:
                    self.orders.append(Erase((place,)))

    def _store(self) -> None:
        entries = []
        for tier, count in zip(self.tiers, self._to_store(), strict=True):
            for block, content in tier.pool.take_unstored(count):
                if content.digest in tier.slots:
                    continue
                slot = self._take_slot(tier.slots)
                if slot is None:
                    tier.pool.untake(block)
                else:
                    entries.append((block, slot, content))
        if entries:
            number = self._begin(_Storing(entries, set(range(self.ranks))))
            self.orders.append(Store(number, *self._numbers(entries)))

    def _stored(self, storing: _Storing) -> None:
        if storing.failed:
            self._rest_until = self.clock() + self.limits.rest
        for block, slot, content in storing.entries:
            tier = self._tier(content.group)
            if tier.pool.still_has(block, content) and not storing.failed:  # else it was evicted meanwhile
                self._put(slot, content)
                self.counters.stored += 1
            else:
                tier.slots.give_back(slot)
                if tier.pool.still_has(block, content):
                    tier.pool.untake(block)
            tier.slots.unpin(slot)

    def _put(self, slot: int, content: Content) -> None:
        self._tier(content.group).slots.put(slot, content)
        if self.files.total and content.group < len(self.kv.windows) and content.digest not in self.files:
            self._unsaved[content.digest] = None

    def _save(self) -> None:
        entries: list[tuple[int, int, Content]] = []
        while self._unsaved and len(entries) < self.limits.saves:
            taken = self.files.take()
            if taken is None:
                break
            place, before = taken
            if before is not None:
                self._left(before)
            slot, content = self.tiers[0].slots.at(self._unsaved.popitem(last=False)[0])
            self.tiers[0].slots.pin(slot)
            entries.append((slot, place, content))
        if entries:
            number = self._begin(_Saving(entries, set(range(self.ranks))))
            self.orders.append(Save(number, _file_blocks(entries)))

    def _saved(self, saving: _Saving) -> None:
        if saving.failed:
            self._saves_rest_until = self.clock() + self.limits.rest
        for slot, place, content in saving.entries:
            if saving.failed or content.digest not in self.tiers[0].slots:  # it was dropped meanwhile
                self.files.give_back(place)
                if content.digest in self.tiers[0].slots:
                    self._unsaved[content.digest] = None
            else:
                self.files.put(place, content)
                self.counters.saved += 1
            self.files.unpin(place)
            self.tiers[0].slots.unpin(slot)

    def _fill(self, waiting: _Waiting, found: Sequence[Found]) -> bool:
        """Reads blocks of the file into host memory, as many as have room there beside the prompt's other ones."""
        pinned = [entry.slot for entry in found if entry.slot is not None and entry.group < len(self.kv.windows)]
        for slot in pinned:
            self.tiers[0].slots.pin(slot)
        entries = []
        assert waiting.request is not None
        chain = waiting.request.chain
        for entry in found:
            if not entry.in_file_alone:
                continue
            taken = self._take_slot(self.tiers[0].slots)
            if taken is None:
                break
            self.files.pin(entry.place)
            content = Content(entry.group, chain.digests[entry.group][entry.index], chain.packed[entry.index])
            entries.append((taken, entry.place, content))
        if not entries:
            for slot in pinned:
                self.tiers[0].slots.unpin(slot)
            return False
        number = self._begin(_Filling(waiting, pinned, entries, set(range(self.ranks))))
        self.orders.append(Fill(number, _file_blocks(entries)))
        return True

    def _filled(self, filling: _Filling) -> None:
        for slot in filling.pinned:
            self.tiers[0].slots.unpin(slot)
        for slot, place, content in filling.entries:
            self.files.unpin(place)
            if filling.failed and (not filling.bad or place in filling.bad):  # computed, and saved, when it is needed
                self.files.drop(content.digest)
                self.tiers[0].slots.give_back(slot)
                self._left(content)
            else:
                self.tiers[0].slots.put(slot, content)
            self.tiers[0].slots.unpin(slot)
        if not filling.failed:
            self.counters.filled += len(filling.entries)
            self.fill_pace.add(filling.seconds, len(filling.entries))
            filling.waiting.seconds += filling.seconds
        request = filling.waiting.request
        if request is None:
            return
        kv = self.kv
        have = kv.lookup(request.chain, len(request.tokens) - 1).tokens // kv.block_size
        blocks, entries = find_longest(kv, self.tiers, Slots(0), request, have)
        if blocks == have or not self._load(filling.waiting, entries):
            self._ready.append(request)

    def _load(self, waiting: _Waiting, found: Sequence[Found]) -> bool:
        kv, request = self.kv, waiting.request
        assert request is not None
        held = kv.new_table(kv.lookup(request.chain, len(request.tokens) - 1))
        shared = [(each.group, each.block) for each in found if each.block is not None and self._hold(each)]
        absent = [each for each in found if each.slot is not None]
        fresh = self._reserve(absent)
        if not fresh:
            self._release(shared)
            kv.release(held)
            return False
        entries, tokens = [], kv.block_size * len({each.index for each in absent if each.group < len(kv.windows)})
        for each, block in zip(absent, fresh, strict=True):
            slots = self._tier(each.group).slots
            slot, content = slots.at(request.chain.digests[each.group][each.index])
            slots.pin(slot)
            entries.append((block, slot, content))
        number = self._begin(_Loading(waiting, held, shared, entries, tokens, set(range(self.ranks))))
        self.orders.append(Load(number, *reversed(self._numbers(entries))))
        return True

    def _hold(self, found: Found) -> bool:
        """Adds a reference to a block of a pool, so that it is still there when the others are loaded, if it can."""
        assert found.block is not None
        if found.group == len(self.kv.windows) and self.kv.states is not None:
            return self.kv.states.hold(found.block)
        self.kv.pool.acquire(found.block)
        return True

    def _reserve(self, absent: Sequence[Found]) -> list[int]:
        """A block of its pool for each, the snapshot last; none if there are too few."""
        pool, states = self.kv.pool, self.kv.states
        blocks = sum(each.group < len(self.kv.windows) for each in absent)
        if blocks and blocks + int(pool.total * self.limits.watermark) > pool.available:
            return []
        if blocks == len(absent) or states is None:
            return pool.allocate(blocks)
        slot = states.reserve()
        return [] if slot is None else [*pool.allocate(blocks), slot]

    def _release(self, held: Sequence[tuple[int, int]]) -> None:
        """held: cache groups and blocks."""
        for tier in self.tiers:
            tier.pool.release([block for group, block in held if self._tier(group) is tier])

    def _loaded(self, loading: _Loading) -> None:
        request, groups = loading.waiting.request, len(self.kv.windows)
        for block, slot, content in loading.entries:
            tier = self._tier(content.group)
            # A content that was dropped meanwhile is in doubt.
            if request is not None and not loading.failed and tier.slots.still_has(slot, content):
                tier.pool.publish(block, content)
            tier.slots.unpin(slot)
        self._release([*loading.shared, *((content.group, block) for block, _, content in loading.entries)])
        self.kv.release(loading.held)
        self.counters.loaded += len(loading.entries)
        self.counters.load_seconds += self.clock() - loading.waiting.since
        sizes = [self._tier(content.group).size for _, _, content in loading.entries]
        self.load_pace.add(loading.seconds, sum(sizes))
        if loading.tokens:  # routers add the time for each token of blocks: that of a state is the same for any prompt
            of_blocks = sum(size for size, entry in zip(sizes, loading.entries, strict=True) if entry[2].group < groups)
            seconds = loading.waiting.seconds + loading.seconds * of_blocks / sum(sizes)
            self.token_pace.add(seconds, loading.tokens)
        if request is not None:
            self._ready.append(request)

    def _tier(self, group: int) -> Tier:
        return self.tiers[group == len(self.kv.windows)]

    def _numbers(self, entries: Sequence[tuple[int, int, Content]]) -> tuple[Numbers, Numbers]:
        """Blocks and slots by cache group; after those of blocks follows that of all states."""
        groups = range(len(self.kv.windows) + len(self.tiers) - 1)
        rows = [[entry for entry in entries if entry[2].group == group] for group in groups]
        blocks = tuple(tuple(block for block, _, _ in row) for row in rows)
        return blocks, tuple(tuple(slot for _, slot, _ in row) for row in rows)


def _file_blocks(entries: Sequence[tuple[int, int, Content]]) -> tuple[FileBlock, ...]:
    return tuple(FileBlock(slot, place, *content[:3]) for slot, place, content in entries)

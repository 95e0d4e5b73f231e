"""Blocks that are about to be evicted go to host memory and on to a file, and come back by prefix hits. Pure.

    cached, evicted next ── Store ─▶ slot of host memory ── Save, soon ─▶ place in the file
    published again      ◀─ Load ─── slot of host memory ◀─ Fill ──────── place in the file

Each is done within each rank, ordered like reads of other replicas' blocks and reported alike. A slot or a place is
pinned meanwhile; what was copied of a block that was evicted meanwhile is dropped. A load only fills the prefix cache:
its request is queued afterwards. Every block in host memory is saved while the file is idle, so that a replica which
starts again finds it.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace_worker.core.kv.blocks import CacheChange, Content
from headrace_worker.core.kv.manager import BlockTable, KVManager
from headrace_worker.core.request import Request
from headrace_worker.core.transfer.orders import ChunkRead, Erase, FileBlock, Fill, Load, Order, Save, Store
from headrace_worker.core.transfer.shards import wanted_blocks
from headrace_worker.core.transfer.slots import Pace, Slots

FIRST_NUMBER = 1 << 32  # in orders and reports: those of fetches from other replicas are lower


@dataclass(frozen=True, slots=True)
class OffloadLimits:
    ahead: float = 0.25  # share of the pool that is free, or stored already and evicted next
    ahead_steps: int = 4  # so many steps of prompts at least: a copy takes two
    most_ahead: float = 0.5  # of the pool
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

    stored: int = 0  # blocks, in host memory
    loaded: int = 0
    load_seconds: float = 0.0
    saved: int = 0  # blocks, in the file
    filled: int = 0


@dataclass(slots=True)
class _Storing:
    entries: list[tuple[int, int, Content]]  # block, slot, content
    missing: set[int]  # ranks
    failed: bool = False
    seconds: float = 0.0  # of the slowest rank


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
    shared: list[int]  # blocks of the pool that have contents of the prompt behind `held`
    entries: list[tuple[int, int, int, int]]  # cache group, index in the prompt, slot, block
    missing: set[int]
    failed: bool = False
    seconds: float = 0.0


@dataclass(slots=True)
class _Waiting:
    """A request that is queued once its blocks are loaded."""

    request: Request | None  # None: it has ended
    since: float
    limit: float  # seconds; then it is queued without what is missing
    seconds: float = 0.0  # of its copies


@dataclass(frozen=True, slots=True)
class _Found:
    """A block of a prompt behind the pool's prefix of it, and where its content is."""

    group: int
    index: int  # in the prompt
    block: int | None  # of the pool
    slot: int | None  # of host memory
    place: int  # in the file; 0 = not there

    @property
    def in_file_alone(self) -> bool:
        return self.slot is None and self.block is None


@dataclass(slots=True)
class Offload:
    """Of one engine. Not thread-safe: the step loop owns it."""

    kv: KVManager
    ranks: int
    slots: Slots
    files: Slots  # places in the ranks' files, which are the same in all
    step_tokens: int  # that a step computes at most
    clock: Callable[[], float]
    step_seconds: Callable[[], float]  # of the newest step; 0 = not known
    limits: OffloadLimits = OffloadLimits()
    counters: OffloadCounters = field(default_factory=OffloadCounters)
    orders: list[Order] = field(default_factory=list)
    load_pace: Pace = field(init=False)  # of a block, from host memory
    fill_pace: Pace = field(init=False)  # of a block, from the file to host memory
    token_pace: Pace = field(init=False)  # of a token, by either or both
    _copying: dict[int, _Storing | _Saving | _Filling | _Loading] = field(default_factory=dict)
    _unsaved: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # in host memory, and not in the file
    _ready: list[Request] = field(default_factory=list)
    _changes: list[CacheChange] = field(default_factory=list)
    _rest_until: float = 0.0
    _saves_rest_until: float = 0.0
    _number: int = FIRST_NUMBER

    def __post_init__(self) -> None:
        self.load_pace, self.fill_pace, self.token_pace = (Pace(self.clock) for _ in range(3))
        if self.slots.total:
            self.kv.pool.follow_unstored()
        self._changes += [CacheChange(each.group, each.digest, False, True) for each in self.files.contents()]

    @property
    def empty(self) -> bool:
        """Whether nothing can be loaded."""
        return not self.slots and not self.files

    @property
    def waiting(self) -> int:
        """Requests that are queued later."""
        return len(self._requests()) + len(self._ready)

    @property
    def busy(self) -> bool:
        """Whether `tick` must be called."""
        return bool(self._copying or self._ready or self._can_save or self._to_store or self.kv.pool.has_forgotten)

    @property
    def has_ready(self) -> bool:
        """Whether a request waits to be queued."""
        return bool(self._ready)

    def tick(self) -> list[Request]:
        """Stores what is evicted next; returns the requests to queue now."""
        for content in self.kv.pool.take_forgotten():
            self._drop(content)
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
        most = (len(request.tokens) - 1) // kv.block_size
        kv.extend_chain(request.chain, request.tokens, most)
        have = kv.lookup(request.chain, len(request.tokens) - 1).tokens // kv.block_size
        blocks, entries = self._longest(request, have, most)
        if blocks - have < self.limits.min_blocks:
            return False
        filed = sum(entry.in_file_alone for entry in entries)
        local_seconds = ((blocks - have) * kv.block_size + queued) * seconds_per_token
        copies = len(entries) * self.load_pace.seconds + filed * self.fill_pace.seconds
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
        own = [change for change in own if not self.kv.pool.has(change.digest)]
        return [
            change if change.stored else change._replace(offloaded=self._has(change.digest))
            for change in (*changes, *own)
        ]

    def held(self) -> list[int]:
        """Blocks that loads hold."""
        loads = [each for each in self._copying.values() if isinstance(each, _Loading)]
        return [
            block
            for each in loads
            for block in (*each.held.held(), *each.shared, *(entry[3] for entry in each.entries))
        ]

    # -- internal ---------------------------------------------------------------------------------------------

    @property
    def _to_store(self) -> int:
        """Cached blocks that should be in host memory now: what is evicted next, while few are free."""
        pool = self.kv.pool
        if not pool.unstored or self.clock() < self._rest_until:
            return 0
        limits = self.limits
        steps = limits.ahead_steps * self.kv.blocks_for(self.step_tokens)
        ahead = max(int(limits.ahead * pool.total), min(steps, int(limits.most_ahead * pool.total)))
        stored = pool.cached - pool.unstored
        wanted = ahead - pool.free - stored
        if self.files.total and not pool.used and not self._unsaved:
            # Nothing runs: what is never evicted, such as a system prompt, is in the file after a restart, too.
            wanted = max(wanted, min(pool.unstored, limits.saves))
        return max(0, min(wanted, self.slots.total, limits.batch))

    @property
    def _can_save(self) -> bool:
        return bool(self.files.total and self._unsaved and self.clock() >= self._saves_rest_until)

    def _requests(self) -> list[_Waiting]:
        return [each.waiting for each in self._copying.values() if isinstance(each, _Filling | _Loading)]

    def _has(self, digest: bytes) -> bool:
        return digest in self.slots or digest in self.files

    def _begin(self, copy: _Storing | _Saving | _Filling | _Loading) -> int:
        self._number += 1
        self._copying[self._number] = copy
        return self._number

    def _take_slot(self) -> int | None:
        taken = self.slots.take()
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

    def _drop(self, content: Content) -> None:
        """A content is in doubt: it is not loaded again."""
        self._unsaved.pop(content.digest, None)
        self.slots.drop(content.digest)
        if content.digest in self.files:
            self.orders.append(Erase((self.files.at(content.digest)[0],)))
            self.files.drop(content.digest)
        self._left(content)

    def _store(self) -> None:
        entries = []
        for block, content in self.kv.pool.take_unstored(self._to_store):
            if content.digest in self.slots:
                continue
            slot = self._take_slot()
            if slot is None:
                self.kv.pool.untake(block)
            else:
                entries.append((block, slot, content))
        if entries:
            number = self._begin(_Storing(entries, set(range(self.ranks))))
            filled = [(content.group, slot, block) for block, slot, content in entries]
            self.orders.append(Store(number, self._by_group(filled, 2), self._by_group(filled, 1)))

    def _stored(self, storing: _Storing) -> None:
        if storing.failed:
            self._rest_until = self.clock() + self.limits.rest
        for block, slot, content in storing.entries:
            if self.kv.pool.still_has(block, content) and not storing.failed:  # else it was evicted meanwhile
                self._put(slot, content)
                self.counters.stored += 1
            else:
                self.slots.give_back(slot)
                if self.kv.pool.still_has(block, content):
                    self.kv.pool.untake(block)
            self.slots.unpin(slot)

    def _put(self, slot: int, content: Content) -> None:
        self.slots.put(slot, content)
        if self.files.total and content.digest not in self.files:
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
            slot, content = self.slots.at(self._unsaved.popitem(last=False)[0])
            self.slots.pin(slot)
            entries.append((slot, place, content))
        if entries:
            number = self._begin(_Saving(entries, set(range(self.ranks))))
            self.orders.append(Save(number, _file_blocks(entries)))

    def _saved(self, saving: _Saving) -> None:
        if saving.failed:
            self._saves_rest_until = self.clock() + self.limits.rest
        for slot, place, content in saving.entries:
            if saving.failed or content.digest not in self.slots:  # it was dropped meanwhile
                self.files.give_back(place)
                if content.digest in self.slots:
                    self._unsaved[content.digest] = None
            else:
                self.files.put(place, content)
                self.counters.saved += 1
            self.files.unpin(place)
            self.slots.unpin(slot)

    def _fill(self, waiting: _Waiting, found: Sequence[_Found]) -> bool:
        """Reads blocks of the file into host memory, as many as have room there beside the prompt's other ones."""
        pinned = [entry.slot for entry in found if entry.slot is not None]
        for slot in pinned:
            self.slots.pin(slot)
        entries = []
        assert waiting.request is not None
        chain = waiting.request.chain
        for entry in found:
            if not entry.in_file_alone:
                continue
            taken = self._take_slot()
            if taken is None:
                break
            self.files.pin(entry.place)
            content = Content(entry.group, chain.digests[entry.group][entry.index], chain.packed[entry.index])
            entries.append((taken, entry.place, content))
        if not entries:
            for slot in pinned:
                self.slots.unpin(slot)
            return False
        number = self._begin(_Filling(waiting, pinned, entries, set(range(self.ranks))))
        self.orders.append(Fill(number, _file_blocks(entries)))
        return True

    def _filled(self, filling: _Filling) -> None:
        for slot in filling.pinned:
            self.slots.unpin(slot)
        for slot, place, content in filling.entries:
            self.files.unpin(place)
            if filling.failed and (not filling.bad or place in filling.bad):  # computed, and saved, when it is needed
                self.files.drop(content.digest)
                self.slots.give_back(slot)
                self._left(content)
            else:
                self.slots.put(slot, content)
            self.slots.unpin(slot)
        if not filling.failed:
            self.counters.filled += len(filling.entries)
            self.fill_pace.add(filling.seconds, len(filling.entries))
            filling.waiting.seconds += filling.seconds
        request = filling.waiting.request
        if request is None:
            return
        kv = self.kv
        have = kv.lookup(request.chain, len(request.tokens) - 1).tokens // kv.block_size
        blocks, entries = self._longest(request, have, (len(request.tokens) - 1) // kv.block_size, in_file=False)
        if blocks == have or not self._load(filling.waiting, entries):
            self._ready.append(request)

    def _load(self, waiting: _Waiting, found: Sequence[_Found]) -> bool:
        kv, request = self.kv, waiting.request
        assert request is not None
        held = kv.new_table(kv.lookup(request.chain, len(request.tokens) - 1))
        shared = [each.block for each in found if each.block is not None]
        for block in shared:
            kv.pool.acquire(block)
        absent = [each for each in found if each.block is None]
        if not absent or len(absent) + int(kv.pool.total * self.limits.watermark) > kv.pool.available:
            kv.pool.release(shared)
            kv.release(held)
            return False
        fresh = kv.pool.allocate(len(absent))
        filled = [(each.group, each.index, each.slot or 0, block) for each, block in zip(absent, fresh, strict=True)]
        for _, _, slot, _ in filled:
            self.slots.pin(slot)
        number = self._begin(_Loading(waiting, held, shared, filled, set(range(self.ranks))))
        self.orders.append(Load(number, self._by_group(filled, 2), self._by_group(filled, 3)))
        return True

    def _longest(self, request: Request, have: int, most: int, *, in_file: bool = True) -> tuple[int, list[_Found]]:
        """Blocks of the longest prefix that is in the pool and here, and those of it that are not in the pool's prefix.

        The longest one of groups without a window, then shorter ones until those with a window have what its next
        query sees. Each block is looked up once.
        """
        kv, chain = self.kv, request.chain
        known: dict[tuple[int, int], _Found | None] = {}

        def find(group: int, index: int) -> _Found | None:
            key = group, index
            if key not in known:
                digest, tokens = chain.digests[group][index], chain.packed[index]
                block = kv.pool.find(digest, tokens)
                slot = self.slots.find(digest, tokens) if block is None else None
                place = self.files.find(digest, tokens) if block is None and in_file else None
                missing = block is None and slot is None and place is None
                known[key] = None if missing else _Found(group, index, block, slot, place or 0)
            return known[key]

        blocks = most
        for group, window in enumerate(kv.windows):
            reach = have
            while not window and reach < blocks and find(group, reach) is not None:
                reach += 1
            blocks = blocks if window else reach
        while blocks > have:
            spans = wanted_blocks(kv.windows, kv.block_size, have, blocks)
            wanted = [(group, index) for group, span in enumerate(spans) for index in range(*span)]
            missing = [index for group, index in wanted if kv.windows[group] and find(group, index) is None]
            if not missing:
                return blocks, [found for key in wanted if (found := find(*key)) is not None]
            blocks = min(missing)  # every shorter prefix that is longer than this needs it, too
        return have, []

    def _loaded(self, loading: _Loading) -> None:
        kv, request = self.kv, loading.waiting.request
        for group, index, slot, block in loading.entries:
            if request is not None and not loading.failed:
                kv.publish_blocks(request.chain, group, index, [block])
            self.slots.unpin(slot)
        kv.pool.release([*loading.shared, *(entry[3] for entry in loading.entries)])
        kv.release(loading.held)
        self.counters.loaded += len(loading.entries)
        self.counters.load_seconds += self.clock() - loading.waiting.since
        self.load_pace.add(loading.seconds, len(loading.entries))
        blocks = len({entry[1] for entry in loading.entries})
        self.token_pace.add(loading.waiting.seconds + loading.seconds, blocks * kv.block_size)
        if request is not None:
            self._ready.append(request)

    def _by_group(self, entries: Sequence[tuple[int, ...]], place: int) -> tuple[tuple[int, ...], ...]:
        groups = range(len(self.kv.windows))
        return tuple(tuple(entry[place] for entry in entries if entry[0] == group) for group in groups)


def _file_blocks(entries: Sequence[tuple[int, int, Content]]) -> tuple[FileBlock, ...]:
    return tuple(FileBlock(slot, place, *content) for slot, place, content in entries)

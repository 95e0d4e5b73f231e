"""The target's side: blocks of a prompt read from another replica before the request is queued. Pure.

    begin ─▶ requested ── Granted, blocks reserved ─▶ moving ── all chunks committed, read by all ranks ─▶ published
                 │ Refused, too few blocks              │ Failed, source lost, silence, deadline
                 └─────────▶ the request is queued ◀────┘   and computes here what is not cached

A fetch only fills the prefix cache: whatever its result, the request is queued afterwards and starts from what is
cached. What was read is valid if the source held it then: a source holds the blocks of a fetch until it is told that
the fetch is over, or for its lease after the newest message that it has. So they are usable only within `patience`,
which is less, of a message that it is known to have. Blocks that a rank may still write are quarantined until every
rank has reported that the fetch is over.
"""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from headrace_worker.core.kv.manager import BlockTable, KVManager
from headrace_worker.core.request import Fetched, Request
from headrace_worker.core.transfer.messages import (
    Cancel,
    Commit,
    Done,
    Failed,
    FetchRequest,
    FromSource,
    Granted,
    Offer,
    Refused,
    Renew,
    Renewed,
    ToSource,
)
from headrace_worker.core.transfer.orders import (
    Connect,
    Disconnect,
    End,
    FetchOver,
    Order,
    Read,
    TransferReport,
)
from headrace_worker.core.transfer.shards import Span, wanted_blocks

_OLDER = 0.8  # weight of earlier chunks beside the newest one

Reads = tuple[float, float, float]  # seconds, blocks, bytes


class SourceSpeed(NamedTuple):
    """How fast a source was read lately."""

    address: str
    block_seconds: float  # seconds per block of the slowest rank: a block is there when all ranks have read their part
    bytes_per_second: float  # sum over all ranks


@dataclass(slots=True)
class _Peer:
    number: int | None = None  # once a Connect was ordered
    avoid_until: float = 0.0
    renewed: dict[int, float] = field(default_factory=dict)  # when renewals were sent that are not answered yet
    next_renewal: float = 0.0
    step_seconds: float = 0.0  # that a step of it may take
    confirmed: float = 0.0  # when the newest message was sent that the source is known to have
    reads: dict[int, Reads] = field(default_factory=dict)  # recent ones, by rank
    measured: float = 0.0


def patience(step_seconds: float) -> float:
    """Seconds without a message of a source whose steps take so long, after which it counts as stalled, and what is
    read as invalid: it answers between steps, after up to two. Its lease is longer.
    """
    return min(max(2.0, 6 * step_seconds), 20.0)


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Times in seconds, on this replica's clock."""

    min_blocks: int = 2  # fewer are computed locally
    margin: float = 0.05  # by which computing a prompt here must be faster, when a router chose a source that computes
    min_seconds: float = 2.0  # lower bound of a fetch's time limit
    max_seconds: float = 600.0  # upper bound of a fetch's time limit
    slowdown: float = 4.0  # the time limit, as a multiple of the time to compute the blocks here
    deadline_share: float = 0.5  # upper bound, as a share of the time until the request's deadline
    renew: float = 0.5  # between two renewals to a source
    avoid: float = 1.0  # during which a lost source is not used
    avoid_silent: float = 10.0  # the same of one that left a fetch without a message: it may be stalled for long
    speed_seconds: float = 60.0  # that a source's measured speed counts: one that was slow is tried again
    watermark: float = 0.05  # share of the pool that reservations leave to running requests

    def timeout(self, local_seconds: float, deadline: float | None, now: float) -> float:
        """Seconds that a fetch may wait for its source, and again compute there: by those to compute it here, and the
        request's deadline.
        """
        timeout = min(max(self.min_seconds, self.slowdown * local_seconds), self.max_seconds)
        return timeout if deadline is None else min(timeout, self.deadline_share * (deadline - now))


class SourcePeers:
    """By address. Times are seconds of the caller's clock."""

    def __init__(self, limits: FetchLimits) -> None:
        self._limits = limits
        self._peers: dict[str, _Peer] = {}
        self._renewals = 0

    def number(self, peer: str) -> int | None:
        """In orders, of a source that is connected."""
        known = self._peers.get(peer)
        return known.number if known is not None else None

    def use(self, peer: str, now: float, step_seconds: float) -> bool:
        """Whether the next message may be sent to this source. Forgets those that are of no use any more.

        step_seconds: that a step may take there, until it says so itself.
        """
        for name, each in list(self._peers.items()):
            if each.number is None and 0 < each.avoid_until <= now:
                del self._peers[name]
        known = self._peers.setdefault(peer, _Peer())
        known.step_seconds = known.step_seconds or step_seconds
        return now >= known.avoid_until

    def connected(self, peer: str, number: int) -> None:
        """The source is connected."""
        self._peers.setdefault(peer, _Peer()).number = number

    def lose(self, peer: str, now: float) -> int | None:
        """The source is avoided for a while; returns its number, if it was connected."""
        known = self._peers.get(peer)
        if known is None:
            return None
        number = known.number
        self._peers[peer] = _Peer(avoid_until=max(known.avoid_until, now + self._limits.avoid))
        return number

    def avoid(self, peer: str, now: float, seconds: float) -> None:
        """The source is not used for a while; it stays connected."""
        if (known := self._peers.get(peer)) is not None:
            known.avoid_until = max(known.avoid_until, now + seconds)

    def renewals(self, used: Collection[str], now: float) -> list[tuple[str, int]]:
        """The sources of running fetches to which a renewal is due, once each time, and its number."""
        due = []
        for peer in used:
            known = self._peers[peer]
            if now >= known.next_renewal:
                self._renewals += 1
                known.renewed[self._renewals] = now
                known.next_renewal = now + self._limits.renew
                due.append((peer, self._renewals))
        return due

    def set_step(self, peer: str, seconds: float) -> None:
        """The source says how long a step may take there."""
        if (known := self._peers.get(peer)) is not None:
            known.step_seconds = seconds

    def answered(self, peer: str, number: int) -> None:
        """The source has a renewal, and hence all before it."""
        if (known := self._peers.get(peer)) is not None and number in known.renewed:
            known.confirmed = known.renewed[number]
            known.renewed = {other: sent for other, sent in known.renewed.items() if other > number}

    def is_silent(self, peer: str, since: float, now: float) -> bool:
        """Whether this source has not answered for too long. since: when one of its fetches was sent."""
        known = self._peers.get(peer, _Peer())
        return now - max(since, known.confirmed) > patience(known.step_seconds)

    def read(self, peer: str, rank: int, chunk: Reads, now: float) -> None:
        """A rank has read a chunk."""
        if (known := self._peers.get(peer)) is not None and chunk[1] > 0:
            seconds, blocks, size = known.reads.get(rank, (0.0, 0.0, 0.0))
            known.reads[rank] = _OLDER * seconds + chunk[0], _OLDER * blocks + chunk[1], _OLDER * size + chunk[2]
            known.measured = now

    def block_seconds(self, peer: str, now: float) -> float:
        """Seconds to read a block of a source; 0 = not known."""
        return next((speed.block_seconds for speed in self.speeds(now) if speed.address == peer), 0.0)

    def speeds(self, now: float) -> list[SourceSpeed]:
        """Speeds of the sources whose speed is known."""
        return [
            SourceSpeed(
                peer,
                max(seconds / blocks for seconds, blocks, _ in known.reads.values()),
                sum(size / max(seconds, 1e-9) for seconds, _, size in known.reads.values()),
            )
            for peer, known in self._peers.items()
            if known.reads and now - known.measured < self._limits.speed_seconds
        ]


@dataclass(slots=True)
class FetchCounters:
    """Monotonic."""

    started: int = 0
    done: int = 0
    failed: int = 0
    num_bytes: int = 0
    seconds: float = 0.0  # total time of completed fetches


@dataclass(slots=True)
class Chunk:
    """Blocks that a source offers, from `first` to before `stop`."""

    first: int
    stop: int
    missing: set[int]  # ranks that have not read it
    cached: int = 0  # leading blocks that the source had in its prefix cache
    committed: bool = False

    @property
    def usable(self) -> bool:
        return self.committed and not self.missing


@dataclass(slots=True)
class Fetch:
    """A fetch, from its request to the source until its request is queued."""

    number: int
    peer: str
    request: Request
    blocks: int
    local_blocks: int  # leading blocks that this replica has already
    held: BlockTable
    wanted: list[Span]  # per cache group
    deadline: float  # until the source computes; then moved
    started: float
    seconds_per_block: float  # predicted, to compute it here
    computing: bool = False  # whether the source has begun to compute the prompt
    reserved: list[list[int]] | None = None  # per cache group: one block for each wanted index
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def offered(self) -> int:
        return self.chunks[-1].stop if self.chunks else self.local_blocks

    @property
    def usable(self) -> int:
        """Number of leading blocks that can be used."""
        stop = self.local_blocks
        for chunk in self.chunks:
            if not chunk.usable:
                break
            stop = chunk.stop
        return stop

    def cached_in(self, usable: int) -> int:
        """Blocks among the usable ones that the source had in its prefix cache."""
        return sum(chunk.cached for chunk in self.chunks if chunk.stop <= usable)

    def add_chunk(self, offer: Offer, ranks: int) -> tuple[tuple[int, ...], ...] | None:
        """Adds the next chunk, for `ranks` ranks; returns the blocks reserved for it by cache group, None if it is not
        the next one.
        """
        if self.reserved is None or (offer.chunk, offer.first) != (len(self.chunks), self.offered):
            return None
        if not offer.first < offer.stop <= self.blocks or len(offer.blocks) != len(self.reserved):
            return None
        mine = []
        for row, (start, stop) in zip(self.reserved, self.wanted, strict=True):
            first, last = max(start, offer.first), min(stop, offer.stop)
            mine.append(tuple(row[first - start : last - start]) if last > first else ())
        if [len(row) for row in mine] != [len(row) for row in offer.blocks]:
            return None
        self.chunks.append(Chunk(offer.first, offer.stop, set(range(ranks)), offer.cached))
        return tuple(mine)


class Fetcher:
    """All fetches of one replica. Not thread-safe: the step loop owns it."""

    def __init__(
        self,
        kv: KVManager,
        ranks: int,
        step_tokens: int,
        clock: Callable[[], float],
        limits: FetchLimits | None = None,
    ) -> None:
        """step_tokens: that a step computes at most."""
        self.limits = limits or FetchLimits()
        self.counters = FetchCounters()
        self.orders: list[Order] = []
        self.messages: list[tuple[str, ToSource]] = []
        self.close_peers: list[str] = []  # to disconnect
        self._kv = kv
        self._clock = clock
        self._ranks = ranks
        self._step_tokens = step_tokens
        self.waiting_of: Counter[bytes] = Counter()  # fetches by tenant: their requests are queued later
        self._fetches: dict[int, Fetch] = {}
        self.peers = SourcePeers(self.limits)
        self._ready: list[Request] = []
        self._quarantined: dict[int, tuple[list[int], list[int], set[int]]] = {}  # by fetch: blocks, slots, ranks
        self._number = 0

    def __len__(self) -> int:
        return len(self._fetches)

    @property
    def has_ready(self) -> bool:
        """Whether a request waits to be queued."""
        return bool(self._ready)

    def begin(self, request: Request, peer: str, seconds_per_token: float, queued: int = 0) -> bool:
        """Starts a fetch for a request; False if it is not worthwhile or impossible, and the request must be queued.

        `seconds_per_token`: predicted time to compute a token here; `queued`: tokens ahead in the local queue.
        """
        kv, limits, now = self._kv, self.limits, self._clock()
        blocks = (len(request.tokens) - 1) // kv.block_size  # the last token is always computed here
        if kv.states is not None and not request.cached_only:
            blocks -= 1  # a state where the next turn finds it, as if the prompt was computed here
        kv.extend_chain(request.chain, request.tokens, blocks)
        hit = kv.lookup(request.chain, len(request.tokens) - 1)
        have = hit.tokens // kv.block_size
        if blocks - have < limits.min_blocks:
            return False
        local_seconds = (queued + (blocks - have) * kv.block_size) * seconds_per_token
        transfer_seconds = (blocks - have + kv.state_blocks) * self.peers.block_seconds(peer, now)
        margin = 0.0 if request.cached_only else limits.margin
        if transfer_seconds >= local_seconds + margin > margin:
            return False  # a router that had no measurement yet chose the source
        timeout = limits.timeout(local_seconds, request.deadline, now)
        if timeout <= 0:
            return False  # the request expires in the queue
        if peer in self.close_peers:
            return False  # its stream will be closed, after the messages of this time were sent
        if not self.peers.use(peer, now, seconds_per_token * self._step_tokens):
            return False
        self._number += 1
        wanted = self._wanted(have, blocks)
        self._fetches[self._number] = Fetch(
            self._number,
            peer,
            request,
            blocks,
            have,
            kv.new_table(hit),
            wanted,
            now + timeout,
            started=now,
            seconds_per_block=seconds_per_token * kv.block_size,
        )
        self.waiting_of[request.tenant_salt] += 1
        self.counters.started += 1
        message = FetchRequest(
            self._number,
            request.tenant_salt,
            request.adapter,
            request.tokens[: blocks * kv.block_size],
            have,
            request.cached_only,
            request.priority,
            timeout,
        )
        self.messages.append((peer, message))
        return True

    def cancel(self, request: Request) -> None:
        """The request has ended: ends its fetch, or removes it from the requests to queue."""
        if request in self._ready:
            self._ready.remove(request)
            return
        for fetch in self._fetches.values():
            if fetch.request is request:
                self._end(fetch, notify=True)
                return

    def connect(self, peer: str, order: Connect) -> None:
        """The source is connected."""
        self.peers.connected(peer, order.peer)
        self.orders.append(order)

    def peer_lost(self, peer: str) -> None:
        """The source cannot be reached (any more)."""
        for fetch in [fetch for fetch in self._fetches.values() if fetch.peer == peer]:
            self._fail(fetch, notify=False)
        if (number := self.peers.lose(peer, self._clock())) is not None:
            self.orders.append(Disconnect(number))

    def receive(self, peer: str, message: FromSource) -> None:
        """Handles a message of a source."""
        if isinstance(message, Renewed):
            self.peers.answered(peer, message.number)
            self.peers.set_step(peer, message.step_seconds)
            return
        fetch = self._fetches.get(message.fetch)
        if fetch is None or fetch.peer != peer:
            # It has ended meanwhile, and the source may not know: the message may have been sent on the stream that
            # followed the one whose loss ended the fetch here. A closed stream is not opened for it.
            if self.peers.number(peer) is not None and not isinstance(message, Refused | Failed):
                self.messages.append((peer, Cancel(message.fetch)))
            return
        match message:
            case Granted(blocks=blocks):
                self.peers.set_step(peer, message.step_seconds)
                if not fetch.local_blocks < blocks <= fetch.blocks:
                    self._reject_peer(peer)
                    return
                self._reserve(fetch, blocks)
            case Offer():
                mine, number = fetch.add_chunk(message, self._ranks), self.peers.number(peer)
                if mine is None or number is None:
                    self._reject_peer(peer)
                    return
                read = Read(number, fetch.number, message.chunk, message.blocks, mine, message.computed)
                self.orders.append(read)
                if not message.computed and not fetch.computing:  # its turn has come at the source
                    fetch.computing, now = True, self._clock()
                    rest = (fetch.blocks - message.first) * fetch.seconds_per_block
                    fetch.deadline = now + self.limits.timeout(rest, fetch.request.deadline, now)
            case Refused() | Failed():
                self._fail(fetch, notify=isinstance(message, Failed))
            case Commit(chunk=chunk):
                if chunk >= len(fetch.chunks):
                    self._reject_peer(peer)
                    return
                fetch.chunks[chunk].committed = True
                self._finish_if_complete(fetch)

    def handle_report(self, report: TransferReport) -> None:
        """Handles a report of a transfer worker of this replica."""
        if isinstance(report, FetchOver):
            blocks, slots, ranks = self._quarantined[report.fetch]
            ranks.discard(report.rank)
            if not ranks:
                del self._quarantined[report.fetch]
                self._kv.pool.end_quarantine(blocks)
                if self._kv.states is not None:
                    self._kv.states.pool.end_quarantine(slots)
            return
        now = self._clock()
        self.counters.num_bytes += report.num_bytes
        fetch = self._fetches.get(report.fetch)
        if fetch is None:
            return
        if not report.good:
            self.peers.avoid(fetch.peer, now, self.limits.avoid)
            self._fail(fetch, notify=True)
            return
        chunk = fetch.chunks[report.chunk]
        chunk.missing.discard(report.rank)
        state = self._kv.state_blocks if chunk.stop == fetch.blocks else 0.0
        read = report.seconds, chunk.stop - chunk.first + state, report.num_bytes
        self.peers.read(fetch.peer, report.rank, read, now)
        self._finish_if_complete(fetch)

    def tick(self) -> list[Request]:
        """Handles timeouts and renewals; returns the requests to queue now."""
        now = self._clock()
        for fetch in list(self._fetches.values()):
            silent = self.peers.is_silent(fetch.peer, fetch.started, now)
            if silent:  # or each of its requests would wait as long
                self.peers.avoid(fetch.peer, now, self.limits.avoid_silent)
            if silent or now >= fetch.deadline:
                self._fail(fetch, notify=True)
        used = {fetch.peer for fetch in self._fetches.values()}
        self.messages += [(peer, Renew(number)) for peer, number in self.peers.renewals(used, now)]
        ready, self._ready = self._ready, []
        return ready

    def held(self) -> list[int]:
        """All blocks held by fetches."""
        groups = len(self._kv.windows)
        return [
            block
            for fetch in self._fetches.values()
            for block in [*fetch.held.held(), *(block for row in (fetch.reserved or [])[:groups] for block in row)]
        ]

    def held_slots(self) -> list[int]:
        """All slots of recurrent state held by fetches."""
        groups = len(self._kv.windows)
        return [slot for fetch in self._fetches.values() for row in (fetch.reserved or [])[groups:] for slot in row]

    # -- internal ---------------------------------------------------------------------------------------------

    def _reserve(self, fetch: Fetch, blocks: int) -> None:
        if fetch.reserved is not None:
            return
        if blocks < fetch.blocks:
            fetch.blocks = blocks
            fetch.wanted = self._wanted(fetch.local_blocks, blocks)
        pool, states = self._kv.pool, self._kv.states
        counts = [stop - start for start, stop in fetch.wanted[: len(self._kv.windows)]]
        spare = int(pool.total * self.limits.watermark)
        slot = states.reserve() if states is not None else None
        if sum(counts) + spare > pool.available or (slot is None) == (states is not None):
            if states is not None and slot is not None:
                states.pool.release([slot])
            self._fail(fetch, notify=True)
            return
        fetch.reserved = [pool.allocate(count) for count in counts] + ([[slot]] if slot is not None else [])

    def _wanted(self, have: int, blocks: int) -> list[Span]:
        kv = self._kv
        return wanted_blocks(kv.windows, kv.block_size, have, blocks, states=kv.states is not None)

    def _finish_if_complete(self, fetch: Fetch) -> None:
        if fetch.usable < fetch.blocks:
            return
        now = self._clock()
        if self.peers.is_silent(fetch.peer, fetch.started, now):
            self._fail(fetch, notify=True)
            return
        self.counters.done += 1
        self.counters.seconds += now - fetch.started
        self.messages.append((fetch.peer, Done(fetch.number)))
        self._end(fetch, notify=False)
        self._ready.append(fetch.request)

    def _fail(self, fetch: Fetch, *, notify: bool) -> None:
        self.counters.failed += 1
        self._end(fetch, notify=notify)
        self._ready.append(fetch.request)

    def _end(self, fetch: Fetch, *, notify: bool) -> None:
        """Publishes the usable blocks; the others are free once no rank can write them any more."""
        del self._fetches[fetch.number]
        tenant = fetch.request.tenant_salt
        self.waiting_of[tenant] -= 1
        if not self.waiting_of[tenant]:
            del self.waiting_of[tenant]
        if notify:
            self.messages.append((fetch.peer, Cancel(fetch.number)))
        # What was read may have been released before, if the source has not answered for long.
        silent = self.peers.is_silent(fetch.peer, fetch.started, self._clock())
        usable = fetch.local_blocks if silent else fetch.usable
        kv, states = self._kv, self._kv.states
        unsafe: list[int] = []
        slots: list[int] = []
        size = kv.block_size
        fetch.request.fetched = Fetched(fetch.local_blocks * size, usable * size, fetch.cached_in(usable) * size)
        for group, row in enumerate(fetch.reserved or []):
            start = fetch.wanted[group][0]
            kept = max(0, min(len(row), usable - start))
            if group < len(kv.windows):
                kv.publish_blocks(fetch.request.chain, group, start, row[:kept])
                kv.pool.release(row[:kept])
                unsafe += row[kept:]
                continue
            if kept and states is not None:
                kv.publish_state(fetch.request.chain, fetch.blocks, row[0], fetch.request.prompt_len)
                states.pool.release(row)
            slots += row[kept:]
        kv.release(fetch.held)
        number = self.peers.number(fetch.peer)
        if (unsafe or slots) and fetch.chunks and number is not None:
            kv.pool.quarantine(unsafe)
            if states is not None:
                states.pool.quarantine(slots)
            self._quarantined[fetch.number] = unsafe, slots, set(range(self._ranks))
            self.orders.append(End(number, fetch.number))
        else:  # no rank has an order to write them
            kv.pool.release(unsafe)
            if states is not None:
                states.pool.release(slots)

    def _reject_peer(self, peer: str) -> None:
        """The source violated the protocol: disconnect it and end its fetches."""
        self.close_peers.append(peer)
        self.peer_lost(peer)

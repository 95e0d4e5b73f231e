"""The target's side: blocks of a prompt fetched from another replica before the request is queued. Pure.

    begin ─▶ asked ── Granted, blocks reserved ─▶ moving ── every chunk committed, received by all ranks ─▶ published
               │ Refused, no room                    │ Failed, peer lost, silence, time over
               └──────────────▶ the request is queued ◀┘   and computes here what it does not find

A fetch only fills the prefix cache: whatever comes of it, the request is queued afterwards and starts from what is
there. Blocks that a rank may still write are quarantined until the order that forbids it is in a launched plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace_worker.kv.manager import KVManager
from headrace_worker.request import Request
from headrace_worker.transfer.fetch import Chunk, Fetch, FetchCounters, FetchLimits
from headrace_worker.transfer.messages import (
    Ask,
    Cancel,
    Commit,
    Done,
    Failed,
    FromSource,
    Granted,
    Offer,
    Refused,
    Renew,
    ToSource,
)
from headrace_worker.transfer.orders import ClosePair, Drop, OpenPair, Order, PairFailed, Receive, Report
from headrace_worker.transfer.shards import wanted_blocks


@dataclass(slots=True)
class _Peer:
    pair: int | None = None  # once its connections are ordered
    avoid_until: float = 0.0
    renewed: float = 0.0
    violated: bool = False


class Fetcher:
    """All fetches of one replica. Not thread-safe: the step loop owns it."""

    def __init__(self, kv: KVManager, ranks: int, limits: FetchLimits | None = None) -> None:
        self.limits = limits or FetchLimits()
        self.counters = FetchCounters()
        self.orders: list[Order] = []
        self.messages: list[tuple[str, ToSource]] = []
        self.close_peers: list[str] = []  # to hang up on
        self._kv = kv
        self._ranks = ranks
        self._fetches: dict[int, Fetch] = {}
        self._peers: dict[str, _Peer] = {}
        self._ready: list[Request] = []
        self._quarantined: dict[int, list[int]] = {}  # by fetch
        self._number = 0

    def __len__(self) -> int:
        return len(self._fetches)

    @property
    def has_ready(self) -> bool:
        """Whether a request waits to be queued."""
        return bool(self._ready)

    def begin(
        self, request: Request, peer: str, now: float, local: float, queued: int = 0, *, compute: bool = True
    ) -> bool:
        """Starts to fetch for a request; False when it does not pay or cannot be, and the request is to be queued.

        `local`: predicted seconds that a token takes to compute here; `queued`: tokens that would come before. Without
        `compute` only what is cached is sent.
        """
        kv, limits = self._kv, self.limits
        known = self._peers.setdefault(peer, _Peer())
        blocks = (len(request.tokens) - 1) // kv.block_size  # the last token is always computed here
        kv.extend_chain(request.chain, request.tokens, blocks)
        hit = kv.lookup(request.chain, len(request.tokens) - 1)
        have = hit.tokens // kv.block_size
        if blocks - have < limits.least_blocks or now < known.avoid_until:
            return False
        alone = (queued + (blocks - have) * kv.block_size) * local
        until = now + min(max(limits.least, limits.patience * alone), limits.most)
        if request.deadline is not None:
            until = min(until, now + limits.share * (request.deadline - now))
            if until <= now:
                return False  # it came too late, and ends in the queue
        self._number += 1
        wanted = wanted_blocks(kv.windows, kv.block_size, have, blocks)
        self._fetches[self._number] = Fetch(
            self._number, peer, request, blocks, have, kv.adopt(hit), wanted, until, began=now, heard=now
        )
        self.counters.started += 1
        ask = Ask(
            self._number,
            request.tenant_salt,
            request.adapter,
            request.tokens[: blocks * kv.block_size],
            have,
            compute,
            request.priority,
            until - now,
        )
        self.messages.append((peer, ask))
        return True

    def forget(self, request: Request) -> None:
        """The request has ended; its fetch, if it has one, ends too, and it is not queued if that was over."""
        if request in self._ready:
            self._ready.remove(request)
            return
        for fetch in self._fetches.values():
            if fetch.request is request:
                self._end(fetch, tell=True)
                return

    def opened(self, peer: str, order: OpenPair) -> None:
        """The source is reached, and the ranks of both are to meet."""
        self._peers.setdefault(peer, _Peer()).pair = order.pair
        self.orders.append(order)

    def lost(self, peer: str, now: float) -> None:
        """The source cannot be reached (any more)."""
        known = self._peers.setdefault(peer, _Peer())
        known.avoid_until = now + self.limits.avoid
        for fetch in [fetch for fetch in self._fetches.values() if fetch.peer == peer]:
            self._fail(fetch, tell=False)
        if known.pair is not None:
            self.orders.append(ClosePair(known.pair))
            known.pair = None

    def heard(self, peer: str, message: FromSource, now: float) -> None:
        """A word from a source, about one fetch of this target's."""
        fetch = self._fetches.get(message.fetch)
        if fetch is not None and fetch.peer != peer:
            self._violate(peer, now)
            return
        if fetch is None and not isinstance(message, Refused | Failed):
            # Given up meanwhile. The source need not know: it may have been asked on a stream that came after the one
            # whose loss ended the fetch here.
            self.messages.append((peer, Cancel(message.fetch)))
        if isinstance(message, Offer):
            self._offered(peer, fetch, message, now)
            return
        if fetch is None:
            return
        fetch.heard = now
        match message:
            case Granted(blocks=blocks):
                if not fetch.have < blocks <= fetch.blocks or (fetch.reserved is not None and blocks != fetch.blocks):
                    self._violate(peer, now)
                    return
                self._granted(fetch, blocks)
            case Refused() | Failed():
                self._fail(fetch, tell=False)
            case Commit(chunk=chunk):
                if chunk >= len(fetch.chunks):
                    self._violate(peer, now)
                    return
                fetch.chunks[chunk].committed = True
                self._settle(fetch, now)

    def reported(self, report: Report, now: float) -> None:
        """A word from a courier of this replica."""
        if isinstance(report, PairFailed):
            for peer, known in self._peers.items():
                if known.pair == report.pair:
                    self.close_peers.append(peer)
                    self.lost(peer, now)
            return
        self.counters.num_bytes += report.num_bytes
        fetch = self._fetches.get(report.fetch)
        if fetch is None or report.chunk >= len(fetch.chunks):
            return
        if not report.good:
            self._fail(fetch, tell=True)
            return
        fetch.heard = now
        fetch.chunks[report.chunk].missing.discard(report.rank)
        self._settle(fetch, now)

    def tick(self, now: float) -> list[Request]:
        """Looks at the clock; the requests that are to be queued now."""
        limits = self.limits
        for fetch in list(self._fetches.values()):
            if now >= fetch.until or now - fetch.heard > limits.silence:
                self._fail(fetch, tell=True)
        for peer in {fetch.peer for fetch in self._fetches.values()}:
            known = self._peers[peer]
            if now - known.renewed >= limits.renew:
                known.renewed = now
                self.messages.append((peer, Renew()))
        ready, self._ready = self._ready, []
        return ready

    def launched(self, orders: Sequence[Order]) -> None:
        """The orders are on their way to all ranks, ahead of whatever is planned later."""
        for order in orders:
            if isinstance(order, Drop) and order.fetch in self._quarantined:
                self._kv.pool.end_quarantine(self._quarantined.pop(order.fetch))

    def held(self) -> list[int]:
        """All blocks held by fetches."""
        return [
            block
            for fetch in self._fetches.values()
            for block in [*fetch.held.held(), *(block for row in fetch.reserved or [] for block in row)]
        ]

    # -- inside -----------------------------------------------------------------------------------------------

    def _granted(self, fetch: Fetch, blocks: int) -> None:
        if fetch.reserved is not None:
            return
        if blocks < fetch.blocks:
            fetch.blocks = blocks
            fetch.wanted = wanted_blocks(self._kv.windows, self._kv.block_size, fetch.have, blocks)
        counts = [stop - start for start, stop in fetch.wanted]
        spare = int(self._kv.pool.total * self.limits.watermark)
        if sum(counts) + spare > self._kv.pool.available:
            self._fail(fetch, tell=True)
            return
        fetch.reserved = [self._kv.pool.allocate(count) for count in counts]

    def _offered(self, peer: str, fetch: Fetch | None, offer: Offer, now: float) -> None:
        """Both ends count on each chunk that was offered: even one that nobody wants is received."""
        pair = self._peers[peer].pair if peer in self._peers else None
        if pair is None:
            return
        if len(offer.counts) != len(self._kv.windows) or sum(offer.counts) > self._kv.pool.total:
            self._violate(peer, now)
            return
        blocks: tuple[tuple[int, ...], ...] = ()
        if fetch is not None:
            fetch.heard = now
            spans = [
                (max(start, offer.first), min(stop, offer.stop)) if fetch.reserved is not None else (0, 0)
                for start, stop in fetch.wanted
            ]
            counts = tuple(max(0, stop - start) for start, stop in spans)
            right = (offer.chunk, offer.first) == (len(fetch.chunks), fetch.offered)
            right = right and offer.first < offer.stop <= fetch.blocks
            if not right or counts != offer.counts or fetch.reserved is None:
                self._violate(peer, now)
                return
            blocks = tuple(
                tuple(row[start - wanted[0] : stop - wanted[0]]) if stop > start else ()
                for row, (start, stop), wanted in zip(fetch.reserved, spans, fetch.wanted, strict=True)
            )
            fetch.chunks.append(Chunk(offer.first, offer.stop, set(range(self._ranks))))
        self.orders.append(Receive(pair, offer.fetch, offer.chunk, offer.counts, blocks))

    def _settle(self, fetch: Fetch, now: float) -> None:
        if fetch.usable == fetch.blocks:
            self.counters.done += 1
            self.counters.seconds += now - fetch.began
            self.messages.append((fetch.peer, Done(fetch.number)))
            self._end(fetch, tell=False)
            self._ready.append(fetch.request)

    def _fail(self, fetch: Fetch, *, tell: bool) -> None:
        self.counters.failed += 1
        self._end(fetch, tell=tell)
        self._ready.append(fetch.request)

    def _end(self, fetch: Fetch, *, tell: bool) -> None:
        """Keeps what is usable, gives the rest back, once no rank can write it any more."""
        del self._fetches[fetch.number]
        if tell:
            self.messages.append((fetch.peer, Cancel(fetch.number)))
        unsafe: list[int] = []
        usable = fetch.usable
        for group, row in enumerate(fetch.reserved or []):
            start = fetch.wanted[group][0]
            kept = max(0, min(len(row), usable - start))
            self._kv.publish_blocks(fetch.request.chain, group, start, row[:kept])
            self._kv.pool.release(row[:kept])
            unsafe += row[kept:]
        self._kv.release(fetch.held)
        pair = self._peers[fetch.peer].pair
        if unsafe and fetch.chunks and pair is not None:
            self._kv.pool.quarantine(unsafe)
            self._quarantined[fetch.number] = unsafe
            self.orders.append(Drop(pair, fetch.number))
        else:  # no rank was told to write them
            self._kv.pool.release(unsafe)

    def _violate(self, peer: str, now: float) -> None:
        """The source does not keep to what was agreed: nothing more is taken from it."""
        self.close_peers.append(peer)
        self.lost(peer, now)

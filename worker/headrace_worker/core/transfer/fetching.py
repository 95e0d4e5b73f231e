"""The target's side: blocks of a prompt fetched from another replica before the request is queued. Pure.

    begin ─▶ requested ── Granted, blocks reserved ─▶ moving ── all chunks committed, received by all ranks ─▶ published
                 │ Refused, too few blocks              │ Failed, peer lost, silence, deadline
                 └─────────▶ the request is queued ◀────┘   and computes here what is not cached

A fetch only fills the prefix cache: whatever its result, the request is queued afterwards and starts from what is
cached. Blocks that a rank may still write are quarantined until the order that forbids it is in a launched plan.
"""

from collections import Counter
from collections.abc import Sequence

from headrace_worker.core.kv.manager import KVManager
from headrace_worker.core.request import Fetched, Request
from headrace_worker.core.transfer.fetch import Fetch, FetchCounters, FetchLimits
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
    ToSource,
)
from headrace_worker.core.transfer.orders import ClosePair, Drop, OpenPair, Order, PairFailed, Receive, Received
from headrace_worker.core.transfer.shards import wanted_blocks
from headrace_worker.core.transfer.source_peers import SourcePeers


class Fetcher:
    """All fetches of one replica. Not thread-safe: the step loop owns it."""

    def __init__(self, kv: KVManager, ranks: int, limits: FetchLimits | None = None) -> None:
        self.limits = limits or FetchLimits()
        self.counters = FetchCounters()
        self.orders: list[Order] = []
        self.messages: list[tuple[str, ToSource]] = []
        self.close_peers: list[str] = []  # to disconnect
        self._kv = kv
        self._ranks = ranks
        self.waiting_of: Counter[bytes] = Counter()  # fetches by tenant: their requests are queued later
        self._fetches: dict[int, Fetch] = {}
        self.peers = SourcePeers(self.limits)
        self._ready: list[Request] = []
        self._quarantined: dict[int, list[int]] = {}  # by fetch
        self._number = 0

    def __len__(self) -> int:
        return len(self._fetches)

    @property
    def has_ready(self) -> bool:
        """Whether a request waits to be queued."""
        return bool(self._ready)

    def begin(self, request: Request, peer: str, now: float, seconds_per_token: float, queued: int = 0) -> bool:
        """Starts a fetch for a request; False if it is not worthwhile or impossible, and the request must be queued.

        `seconds_per_token`: predicted time to compute a token here; `queued`: tokens ahead in the local queue.
        """
        kv, limits = self._kv, self.limits
        blocks = (len(request.tokens) - 1) // kv.block_size  # the last token is always computed here
        kv.extend_chain(request.chain, request.tokens, blocks)
        hit = kv.lookup(request.chain, len(request.tokens) - 1)
        have = hit.tokens // kv.block_size
        if blocks - have < limits.min_blocks:
            return False
        local_seconds = (queued + (blocks - have) * kv.block_size) * seconds_per_token
        transfer_seconds = (blocks - have) * self.peers.block_seconds(peer, now)
        if request.cached_only and transfer_seconds >= local_seconds > 0:
            return False
        # A source says how fast it is: what it says may not keep the request for much longer than computing here.
        slower = max(local_seconds, min(transfer_seconds, limits.slowest * local_seconds))
        timeout = limits.timeout(slower, None if request.deadline is None else request.deadline - now)
        if timeout <= 0:
            return False  # the request expires in the queue
        if peer in self.close_peers:
            return False  # its stream will be closed, after the messages of this time were sent
        if not self.peers.use(peer, self._used_peers, now):
            if (replaced := self.peers.replace(peer, self._used_peers, now)) is None:
                return False
            self.close_peers.append(replaced[0])
            self.orders.append(ClosePair(replaced[1]))
            self.peers.use(peer, self._used_peers, now)
        self._number += 1
        wanted = wanted_blocks(kv.windows, kv.block_size, have, blocks)
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
            last_received=now,
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

    def open_pair(self, peer: str, order: OpenPair) -> None:
        """The source is connected: the ranks of both replicas are to connect."""
        self.peers.open(peer, order.pair)
        self.orders.append(order)

    def peer_lost(self, peer: str, now: float) -> None:
        """The source cannot be reached (any more)."""
        for fetch in [fetch for fetch in self._fetches.values() if fetch.peer == peer]:
            self._fail(fetch, notify=False)
        if (pair := self.peers.lose(peer, now)) is not None:
            self.orders.append(ClosePair(pair))

    def receive(self, peer: str, message: FromSource, now: float) -> None:
        """Handles a message of a source, about one fetch of this target."""
        fetch = self._fetches.get(message.fetch)
        if fetch is not None and fetch.peer != peer:
            self._reject_peer(peer, now)
            return
        if fetch is None and self.peers.pair(peer) is not None and not isinstance(message, Refused | Failed):
            # The fetch has ended meanwhile, and the source may not know: its message may have been sent on the
            # stream that followed the one whose loss ended the fetch here. A closed stream is not opened for it.
            self.messages.append((peer, Cancel(message.fetch)))
        if isinstance(message, Offer):
            self._handle_offer(peer, fetch, message, now)
            return
        if fetch is None:
            return
        fetch.last_received = now
        match message:
            case Granted(blocks=blocks, block_seconds=block_seconds):
                self.peers.set_speed(peer, block_seconds, now)
                changed = fetch.reserved is not None and blocks != fetch.blocks
                if changed or not fetch.local_blocks < blocks <= fetch.blocks:
                    self._reject_peer(peer, now)
                    return
                self._reserve(fetch, blocks)
            case Refused() | Failed():
                self._fail(fetch, notify=False)
            case Commit(chunk=chunk):
                if chunk >= len(fetch.chunks):
                    self._reject_peer(peer, now)
                    return
                fetch.chunks[chunk].committed = True
                self._finish_if_complete(fetch, now)

    def handle_report(self, report: Received | PairFailed, now: float) -> None:
        """Handles a report of a transfer worker of this replica."""
        if isinstance(report, PairFailed):
            if (peer := self.peers.of_pair(report.pair)) is not None:
                self._reject_peer(peer, now)
            return
        self.counters.num_bytes += report.num_bytes
        fetch = self._fetches.get(report.fetch)
        if fetch is None or report.chunk >= len(fetch.chunks):
            return
        if not report.good:
            self._fail(fetch, notify=True)
            return
        fetch.last_received = now
        fetch.chunks[report.chunk].missing.discard(report.rank)
        self._finish_if_complete(fetch, now)

    def tick(self, now: float) -> list[Request]:
        """Handles timeouts and renewals; returns the requests to queue now."""
        limits = self.limits
        for fetch in list(self._fetches.values()):
            silent = now - fetch.last_received > limits.silence
            if silent:  # or each of its requests would wait as long
                self.peers.avoid_silent(fetch.peer, now)
            if silent or now >= fetch.deadline:
                self._fail(fetch, notify=True)
        self.messages += [(peer, Renew()) for peer in self.peers.renewals(self._used_peers, now)]
        ready, self._ready = self._ready, []
        return ready

    def launched(self, orders: Sequence[Order]) -> None:
        """The orders were sent to all ranks, ahead of all later plans."""
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

    # -- internal ---------------------------------------------------------------------------------------------

    @property
    def _used_peers(self) -> set[str]:
        return {fetch.peer for fetch in self._fetches.values()}

    def _reserve(self, fetch: Fetch, blocks: int) -> None:
        if fetch.reserved is not None:
            return
        if blocks < fetch.blocks:
            fetch.blocks = blocks
            fetch.wanted = wanted_blocks(self._kv.windows, self._kv.block_size, fetch.local_blocks, blocks)
        counts = [stop - start for start, stop in fetch.wanted]
        spare = int(self._kv.pool.total * self.limits.watermark)
        if sum(counts) + spare > self._kv.pool.available:
            self._fail(fetch, notify=True)
            return
        fetch.reserved = [self._kv.pool.allocate(count) for count in counts]

    def _handle_offer(self, peer: str, fetch: Fetch | None, offer: Offer, now: float) -> None:
        """Each offered chunk is received, even one whose fetch has ended: both ends count chunks."""
        pair = self.peers.pair(peer)
        if pair is None:
            return
        if len(offer.counts) != len(self._kv.windows) or sum(offer.counts) > self._kv.pool.total:
            self._reject_peer(peer, now)
            return
        blocks: tuple[tuple[int, ...], ...] = ()
        if fetch is not None:
            fetch.last_received = now
            added = fetch.add_chunk(offer, self._ranks)
            if added is None:
                self._reject_peer(peer, now)
                return
            blocks = added
        self.orders.append(Receive(pair, offer.fetch, offer.chunk, offer.counts, blocks))

    def _finish_if_complete(self, fetch: Fetch, now: float) -> None:
        if fetch.usable == fetch.blocks:
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
        """Publishes the usable blocks; releases the others once no rank can write them any more."""
        del self._fetches[fetch.number]
        tenant = fetch.request.tenant_salt
        self.waiting_of[tenant] -= 1
        if not self.waiting_of[tenant]:
            del self.waiting_of[tenant]
        if notify:
            self.messages.append((fetch.peer, Cancel(fetch.number)))
        unsafe: list[int] = []
        usable, size = fetch.usable, self._kv.block_size
        fetch.request.fetched = Fetched(fetch.local_blocks * size, usable * size, fetch.cached * size)
        for group, row in enumerate(fetch.reserved or []):
            start = fetch.wanted[group][0]
            kept = max(0, min(len(row), usable - start))
            self._kv.publish_blocks(fetch.request.chain, group, start, row[:kept])
            self._kv.pool.release(row[:kept])
            unsafe += row[kept:]
        self._kv.release(fetch.held)
        pair = self.peers.pair(fetch.peer)
        if unsafe and fetch.chunks and pair is not None:
            self._kv.pool.quarantine(unsafe)
            self._quarantined[fetch.number] = unsafe
            self.orders.append(Drop(pair, fetch.number))
        else:  # no rank has an order to write them
            self._kv.pool.release(unsafe)

    def _reject_peer(self, peer: str, now: float) -> None:
        """The source violated the protocol, cannot be reached or is not used: disconnect it and end its fetches."""
        self.close_peers.append(peer)
        self.peer_lost(peer, now)

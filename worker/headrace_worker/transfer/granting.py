"""The source's side: prompts computed for other replicas, and blocks pushed to them. Pure.

    ask ─▶ granted: a request without sampling is queued ── steps ─▶ chunks: Send in the step's plan, Offer at once,
             │                                                        Commit when the step is known to have computed it
             └─▶ held until Done; dropped on Cancel, preemption, the target's loss or silence

The answer to an ask never waits for memory that others hold: there is room now, or it is refused. Blocks are held
until every rank of the target has them. Whatever ends a grant earlier puts a `Drop` into the next plan, ahead of
anything that could use its blocks again.
"""

from dataclasses import dataclass, field

from headrace_worker.kv.manager import BlockTable, KVManager
from headrace_worker.plan import RowSampling
from headrace_worker.request import Finish, Request
from headrace_worker.scheduler import Scheduler
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
    ToSource,
)
from headrace_worker.transfer.orders import ClosePair, Drop, OpenPair, Order, Send
from headrace_worker.transfer.shards import Span, wanted_blocks


@dataclass(frozen=True, slots=True)
class GrantLimits:
    """Times in seconds, on this replica's clock."""

    most: int = 64  # grants at a time
    lease: float = 5.0  # without a word of the target until its grants end
    renew: float = 0.5  # between two signs of life to a target
    watermark: float = 0.05  # share of the pool that grants leave to those who run


@dataclass(slots=True)
class GrantCounters:
    """Monotonic."""

    granted: int = 0
    refused: int = 0
    dropped: int = 0


@dataclass(slots=True)
class _Grant:
    peer: str
    fetch: int
    blocks: int
    wanted: list[Span]  # per cache group
    request: Request | None  # until all is computed
    table: BlockTable | None = None  # from then on; before, what was sent from
    sent: int = 0  # blocks from the first on that the target has, or that were sent
    chunks: int = 0
    uncommitted: list[tuple[int, int]] = field(default_factory=list)  # (step, chunk)


@dataclass(slots=True)
class _Peer:
    pair: int
    heard: float
    renewed: float


class Granter:
    """All grants of one replica. Not thread-safe: the step loop owns it."""

    def __init__(self, scheduler: Scheduler, limits: GrantLimits | None = None) -> None:
        self.limits = limits or GrantLimits()
        self.counters = GrantCounters()
        self.willing = True  # to compute for others: a matter of the replica's role
        self.seconds_per_token = 0.0  # as predicted now; 0 = not known yet
        self.orders: list[Order] = []
        self.messages: list[tuple[str, FromSource]] = []
        self.close_peers: list[str] = []  # to hang up on
        self._scheduler = scheduler
        self._kv: KVManager = scheduler.kv
        self._grants: dict[tuple[str, int], _Grant] = {}
        self._peers: dict[str, _Peer] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._grants)

    def opened(self, peer: str, order: OpenPair, now: float) -> None:
        """A target has come, and the ranks of both are to meet."""
        self._peers[peer] = _Peer(order.pair, now, now)
        self.orders.append(order)

    def lost(self, peer: str) -> None:
        """A target is gone."""
        known = self._peers.pop(peer, None)
        for grant in [grant for grant in self._grants.values() if grant.peer == peer]:
            self._drop(grant, known)
        if known is not None:
            self.orders.append(ClosePair(known.pair))

    def pair_failed(self, pair: int) -> None:
        """A courier of this replica has lost its connections to a target."""
        for peer in [peer for peer, known in self._peers.items() if known.pair == pair]:
            self.close_peers.append(peer)
            self.lost(peer)

    def heard(self, peer: str, message: ToSource, now: float) -> None:
        """A word from a target."""
        known = self._peers.get(peer)
        if known is None:
            return
        known.heard = now
        match message:
            case Ask():
                self._ask(peer, message, now)
            case Cancel(fetch):
                grant = self._grants.get((peer, fetch))
                if grant is not None:
                    self._drop(grant, known)
            case Done(fetch):
                grant = self._grants.pop((peer, fetch), None)
                if grant is not None:
                    self._release(grant)

    def tick(self, now: float) -> None:
        """Looks at the clock."""
        for peer, known in list(self._peers.items()):
            mine = [grant for grant in self._grants.values() if grant.peer == peer]
            if not mine:
                continue
            if now - known.heard > self.limits.lease:
                for grant in mine:
                    self._drop(grant, known)
            elif now - known.renewed >= self.limits.renew:
                known.renewed = now
                self.messages += [(peer, Granted(grant.fetch, grant.blocks)) for grant in mine]

    def planned(self, step: int) -> None:
        """A step is planned, and not launched: what of the grants will be complete after it goes out with it.

        Step 0 stands for a plan without work.
        """
        for grant in list(self._grants.values()):
            known = self._peers[grant.peer]
            request = grant.request
            if request is None:
                continue
            given_up = grant.chunks > 0 and request.table is not grant.table
            if given_up or request.finish is not None:
                self._fail(grant, known, "the source had to give the blocks up")  # preempted, or its step failed
                continue
            if request.table is not None:
                grant.table = request.table
                self._push(grant, known, min(request.computed // self._kv.block_size, grant.blocks), step)

    def processed(self, step: int) -> None:
        """A step's work is known to be done."""
        for grant in list(self._grants.values()):
            while grant.uncommitted and grant.uncommitted[0][0] <= step:
                _, chunk = grant.uncommitted.pop(0)
                self.messages.append((grant.peer, Commit(grant.fetch, chunk)))
            request = grant.request
            complete = grant.sent == grant.blocks and not grant.uncommitted
            if request is not None and complete and request.table is grant.table:
                grant.table, grant.request = self._scheduler.detach(request), None

    def held(self) -> list[int]:
        """Blocks held by grants whose request has ended."""
        return [
            block
            for grant in self._grants.values()
            if grant.request is None and grant.table is not None
            for block in grant.table.held()
        ]

    # -- inside -----------------------------------------------------------------------------------------------

    def _ask(self, peer: str, ask: Ask, now: float) -> None:
        reason = self._refusal(peer, ask)
        if reason:
            self.counters.refused += 1
            self.messages.append((peer, Refused(ask.fetch, reason)))
            return
        kv = self._kv
        blocks = len(ask.token_ids) // kv.block_size
        chain = kv.start_chain(ask.tenant_salt, ask.adapter)
        kv.extend_chain(chain, ask.token_ids, blocks)
        hit = kv.lookup(chain, len(ask.token_ids))
        if not ask.compute and hit.tokens // kv.block_size > ask.have:
            blocks = hit.tokens // kv.block_size
        wanted = wanted_blocks(kv.windows, kv.block_size, ask.have, blocks)
        grant = _Grant(peer, ask.fetch, blocks, wanted, None, sent=ask.have)
        if hit.tokens == blocks * kv.block_size:
            grant.table = kv.adopt(hit)
        else:
            promised = sum(
                kv.blocks_for(len(other.request.tokens))
                for other in self._grants.values()
                if other.request is not None and other.request.table is None
            )
            spare = int(kv.pool.total * self.limits.watermark)
            if not ask.compute or kv.cost_of(hit, len(ask.token_ids)) + promised + spare > kv.pool.available:
                self.counters.refused += 1
                reason = "the source has no room" if ask.compute else "the source does not have it"
                self.messages.append((peer, Refused(ask.fetch, reason)))
                return
            self._number += 1
            grant.request = Request(
                attempt_id=b"grant" + self._number.to_bytes(11, "big"),
                tokens=list(ask.token_ids),
                prompt_len=len(ask.token_ids),
                max_len=len(ask.token_ids) + 1,
                sampling=RowSampling(),
                stop_ids=frozenset(),
                chain=chain,
                arrival=now,
                priority=ask.priority,
                tenant_salt=ask.tenant_salt,
                adapter=ask.adapter,
                prefill_only=True,
            )
            self._scheduler.add(grant.request)
        self.counters.granted += 1
        self._grants[peer, ask.fetch] = grant
        self.messages.append((peer, Granted(ask.fetch, blocks)))
        if grant.request is None:
            self._push(grant, self._peers[peer], blocks, 0)

    def _refusal(self, peer: str, ask: Ask) -> str:
        if not self.willing and ask.compute:
            return "this replica computes no prompts for others"
        if len(self._grants) >= self.limits.most or self._scheduler.is_full:
            return "the source is full"
        if (peer, ask.fetch) in self._grants:
            return "this fetch was asked for already"
        size = self._kv.block_size
        if not ask.token_ids or len(ask.token_ids) % size or not 0 <= ask.have < len(ask.token_ids) // size:
            return "an ask is for whole blocks, at least one"
        ahead = self._scheduler.missing_tokens + len(ask.token_ids) - ask.have * size
        if ask.compute and ask.patience and ahead * self.seconds_per_token > ask.patience:
            return "the source has too much to do"
        return ""

    def _push(self, grant: _Grant, known: _Peer, ready: int, step: int) -> None:
        """Sends the blocks up to `ready` that were not sent."""
        first = grant.sent
        if ready <= first or grant.table is None:
            return
        spans = [(max(start, first), min(stop, ready)) for start, stop in grant.wanted]
        blocks = tuple(
            tuple(table[start:stop]) if stop > start else ()
            for table, (start, stop) in zip(grant.table.tables, spans, strict=True)
        )
        counts = tuple(len(row) for row in blocks)
        if not any(counts):
            return  # no query of the target sees these: they go with the next ones
        self.orders.append(Send(known.pair, grant.fetch, grant.chunks, blocks))
        self.messages.append((grant.peer, Offer(grant.fetch, grant.chunks, first, ready, counts)))
        grant.uncommitted.append((step, grant.chunks))
        grant.chunks += 1
        grant.sent = ready
        if not step:
            self.processed(0)

    def _fail(self, grant: _Grant, known: _Peer, reason: str) -> None:
        self.messages.append((grant.peer, Failed(grant.fetch, reason)))
        self._drop(grant, known)

    def _drop(self, grant: _Grant, known: _Peer | None) -> None:
        """Ends a grant before the target has everything."""
        self.counters.dropped += 1
        del self._grants[grant.peer, grant.fetch]
        if known is not None and grant.chunks:
            self.orders.append(Drop(known.pair, grant.fetch))
        self._release(grant)

    def _release(self, grant: _Grant) -> None:
        if grant.request is not None:
            if grant.request.finish is None:
                self._scheduler.end(grant.request, Finish.CANCELLED)
        elif grant.table is not None:
            self._kv.release(grant.table)

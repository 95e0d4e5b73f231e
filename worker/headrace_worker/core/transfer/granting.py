"""The source's side: prompts computed for other replicas, and blocks pushed to them. Pure.

    FetchRequest ─▶ granted: a request without sampling is queued
                      │ steps ─▶ chunks: Send in the step's plan, Offer at once,
                      │                  Commit when the step is known to have computed it
                      └─▶ held until Done; dropped on Cancel, preemption, the target's loss or silence

The answer to a request never waits for memory that other requests hold: there are enough blocks now, or it is refused.
Blocks are held until every rank of the target has them. A grant that ends earlier puts a `Drop` into the next plan,
ahead of anything that could use its blocks again.
"""

from collections import Counter
from dataclasses import dataclass, field

from headrace_worker.core.fair_shares import has_place
from headrace_worker.core.kv.manager import KVManager
from headrace_worker.core.plan import RowSampling
from headrace_worker.core.request import Finish, Request
from headrace_worker.core.scheduler import Scheduler
from headrace_worker.core.transfer.grant import Grant, GrantLimits
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
    ToSource,
)
from headrace_worker.core.transfer.orders import ClosePair, Drop, OpenPair, Order, Send, Sent
from headrace_worker.core.transfer.send_speed import SendSpeed
from headrace_worker.core.transfer.shards import wanted_blocks


@dataclass(slots=True)
class _Peer:
    pair: int
    last_received: float
    renewed: float
    speed: SendSpeed = field(default_factory=SendSpeed)


class Granter:
    """All grants of one replica. Not thread-safe: the step loop owns it."""

    def __init__(self, scheduler: Scheduler, limits: GrantLimits | None = None) -> None:
        self.limits = limits or GrantLimits()
        self.granted = 0  # since boot
        self.computes_for_others = True  # depends on the replica's role
        self._seconds_per_token = 0.0  # as predicted now; 0 = not known yet
        self.orders: list[Order] = []
        self.messages: list[tuple[str, FromSource]] = []
        self.close_peers: list[str] = []  # to disconnect
        self._scheduler = scheduler
        self._kv: KVManager = scheduler.kv
        self._grants: dict[tuple[str, int], Grant] = {}
        self._peers: dict[str, _Peer] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._grants)

    def open_pair(self, peer: str, order: OpenPair, now: float) -> None:
        """A target has connected: the ranks of both replicas are to connect."""
        self._peers[peer] = _Peer(order.pair, now, now)
        self.orders.append(order)

    def peer_lost(self, peer: str) -> None:
        """A target is lost: drops its grants."""
        known = self._peers.pop(peer, None)
        for grant in [grant for grant in self._grants.values() if grant.peer == peer]:
            self._drop(grant, known)
        if known is not None:
            self.orders.append(ClosePair(known.pair))

    def pair_failed(self, pair: int) -> None:
        """A transfer worker of this replica lost its connections to a target."""
        for peer in [peer for peer, known in self._peers.items() if known.pair == pair]:
            self.close_peers.append(peer)
            self.peer_lost(peer)

    def sent(self, report: Sent) -> None:
        """A rank of this replica has sent a chunk."""
        for known in self._peers.values():
            if known.pair == report.pair:
                known.speed.add(report.rank, report.blocks, report.seconds)

    def receive(self, peer: str, message: ToSource, now: float) -> None:
        """Handles a message of a target."""
        known = self._peers.get(peer)
        if known is None:
            return
        known.last_received = now
        match message:
            case FetchRequest():
                self._handle_request(peer, message, now)
            case Cancel(fetch):
                grant = self._grants.get((peer, fetch))
                if grant is not None:
                    self._drop(grant, known)
            case Done(fetch):
                grant = self._grants.get((peer, fetch))
                if grant is not None and grant.complete:
                    del self._grants[peer, fetch]
                    self._release(grant)
                elif grant is not None:
                    self._drop(grant, known)  # chunks may be under way from its blocks

    def tick(self, now: float, seconds_per_token: float) -> None:
        """Handles expired leases and renewals. `seconds_per_token`: predicted time to compute a token here."""
        self._seconds_per_token = seconds_per_token
        for peer, known in list(self._peers.items()):
            mine = [grant for grant in self._grants.values() if grant.peer == peer]
            if not mine:
                continue
            if now - known.last_received > self.limits.lease:
                for grant in mine:
                    self._drop(grant, known)
            elif now - known.renewed >= self.limits.renew:
                known.renewed = now
                self.messages += [
                    (peer, Granted(grant.fetch, grant.blocks, known.speed.block_seconds)) for grant in mine
                ]

    def planned(self, step: int) -> None:
        """A step is planned, and not launched: blocks that are complete after it are sent with it.

        Step 0 is a plan without work.
        """
        for grant in list(self._grants.values()):
            known = self._peers[grant.peer]
            request = grant.request
            if request is None:
                continue
            released = grant.chunks > 0 and request.table is not grant.table
            if released or request.finish is not None:
                self._fail(grant, known, "the source had to release the blocks")  # preempted, or its step failed
                continue
            if request.table is not None:
                grant.table = request.table
                self._push(grant, known, min(request.computed // self._kv.block_size, grant.blocks), step)

    def processed(self, step: int) -> None:
        """A step's work is done: commits its chunks."""
        for grant in list(self._grants.values()):
            while grant.uncommitted and grant.uncommitted[0][0] <= step:
                _, chunk = grant.uncommitted.pop(0)
                self.messages.append((grant.peer, Commit(grant.fetch, chunk)))
            request = grant.request
            if request is not None and grant.complete and request.table is grant.table:
                grant.table, grant.request = self._scheduler.detach(request), None

    def held(self) -> list[int]:
        """Blocks held by grants whose request has ended."""
        return [
            block
            for grant in self._grants.values()
            if grant.request is None and grant.table is not None
            for block in grant.table.held()
        ]

    # -- internal ---------------------------------------------------------------------------------------------

    def _handle_request(self, peer: str, message: FetchRequest, now: float) -> None:
        reason = self._refusal(peer, message)
        if reason:
            self.messages.append((peer, Refused(message.fetch, reason)))
            return
        kv = self._kv
        blocks = len(message.token_ids) // kv.block_size
        chain = kv.start_chain(message.tenant_salt, message.adapter)
        kv.extend_chain(chain, message.token_ids, blocks)
        hit = kv.lookup(chain, len(message.token_ids))
        if message.cached_only and hit.tokens // kv.block_size > message.held:
            blocks = hit.tokens // kv.block_size
        wanted = wanted_blocks(kv.windows, kv.block_size, message.held, blocks)
        grant = Grant(peer, message.fetch, message.tenant_salt, blocks, wanted, None, sent=message.held)
        if hit.tokens == blocks * kv.block_size:
            grant.table = kv.new_table(hit)
            if not message.cached_only:  # else the blocks belong to a stream that was migrated
                self._scheduler.counters.count_lookup(len(message.token_ids), hit.tokens)
        else:
            reserved = sum(
                kv.blocks_for(len(other.request.tokens))
                for other in self._grants.values()
                if other.request is not None and other.request.table is None
            )
            spare = int(kv.pool.total * self.limits.watermark)
            if message.cached_only or kv.cost_of(hit, len(message.token_ids)) + reserved + spare > kv.pool.available:
                reason = "the source has not cached it" if message.cached_only else "the source has too few free blocks"
                self.messages.append((peer, Refused(message.fetch, reason)))
                return
            self._number += 1
            grant.request = Request(
                attempt_id=b"grant" + self._number.to_bytes(11, "big"),
                tokens=list(message.token_ids),
                prompt_len=len(message.token_ids),
                max_len=len(message.token_ids) + 1,
                sampling=RowSampling(),
                stop_ids=frozenset(),
                chain=chain,
                arrival=now,
                priority=message.priority,
                tenant_salt=message.tenant_salt,
                adapter=message.adapter,
                prefill_only=True,
            )
            self._scheduler.add(grant.request)
        self.granted += 1
        self._grants[peer, message.fetch] = grant
        known = self._peers[peer]
        self.messages.append((peer, Granted(message.fetch, blocks, known.speed.block_seconds)))
        if grant.request is None:
            self._push(grant, known, blocks, 0)

    def _refusal(self, peer: str, message: FetchRequest) -> str:
        if not self.computes_for_others and not message.cached_only:
            return "this replica computes no prompts for others"
        tenant, grants = message.tenant_salt, Counter(grant.tenant for grant in self._grants.values())
        has_grant = has_place(self.limits.max_grants, len(self._grants), grants[tenant], len(grants))
        if not (has_grant and self._scheduler.has_place(tenant, Counter())):
            return "the source is full"
        if (peer, message.fetch) in self._grants:
            return "this fetch was requested already"
        size, tokens = self._kv.block_size, len(message.token_ids)
        if not tokens or tokens % size or not 0 <= message.held < tokens // size:
            return "a fetch is for whole blocks, at least one"
        ahead = self._scheduler.missing_tokens + tokens - message.held * size
        if not message.cached_only and message.timeout and ahead * self._seconds_per_token > message.timeout:
            return "the source's queue is too long"
        return ""

    def _push(self, grant: Grant, known: _Peer, ready: int, step: int) -> None:
        """Sends the blocks up to `ready` that were not sent yet."""
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
            return  # no query of the target attends to these: they are sent with the next ones
        self.orders.append(Send(known.pair, grant.fetch, grant.chunks, blocks))
        found = grant.blocks if grant.request is None else grant.request.cached_tokens // self._kv.block_size
        cached = min(max(found - first, 0), ready - first)
        self.messages.append((grant.peer, Offer(grant.fetch, grant.chunks, first, ready, counts, cached)))
        grant.uncommitted.append((step, grant.chunks))
        grant.chunks += 1
        grant.sent = ready
        if not step:
            self.processed(0)

    def _fail(self, grant: Grant, known: _Peer, reason: str) -> None:
        self.messages.append((grant.peer, Failed(grant.fetch, reason)))
        self._drop(grant, known)

    def _drop(self, grant: Grant, known: _Peer | None) -> None:
        """Ends a grant before the target has all blocks."""
        del self._grants[grant.peer, grant.fetch]
        if known is not None and grant.chunks:
            self.orders.append(Drop(known.pair, grant.fetch))
        self._release(grant)

    def _release(self, grant: Grant) -> None:
        if grant.request is not None:
            if grant.request.finish is None:
                self._scheduler.end(grant.request, Finish.CANCELLED)
        elif grant.table is not None:
            self._kv.release(grant.table)

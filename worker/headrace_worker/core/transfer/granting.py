"""The source's side: prompts computed for other replicas, whose ranks read the blocks. Pure.

    FetchRequest ─▶ granted: a request without sampling is queued
                      │ steps ─▶ chunks: Announce in the step's plan, Offer at once,
                      │                  Commit when the step is known to have computed it
                      └─▶ held until Done or Cancel, or the end of the lease

The answer to a request never waits for memory that other requests hold: there are enough blocks now, or it is refused.
A grant references each block from its offer on, whatever happens to the request that computes it: what a target reads
is not used again before the target says that it reads no more, or has been silent for the lease, even if its stream
is lost. The target does not use what it reads later.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace_worker.core.kv.manager import BlockTable, KVManager, PrefixHit
from headrace_worker.core.plan import RowSampling
from headrace_worker.core.queue import has_room
from headrace_worker.core.request import Finish, Request
from headrace_worker.core.scheduler import Scheduler
from headrace_worker.core.transfer.fetching import patience
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
from headrace_worker.core.transfer.orders import Announce, Connect, Disconnect, End, Order
from headrace_worker.core.transfer.shards import Span, wanted_blocks


def lease(step_seconds: float) -> float:
    """Seconds since the newest message of a target, until its grants end. step_seconds: the longest that it was told.

    Longer than the target waits for an answer, and uses what it reads.
    """
    return 1.5 * patience(step_seconds) + 1.0


@dataclass(frozen=True, slots=True)
class GrantLimits:
    max_grants: int = 64  # at a time; of a tenant with less than its part up to twice as many
    watermark: float = 0.05  # share of the pool that grants leave to running requests


@dataclass(slots=True)
class Grant:
    """From the answer to a request until the target's word that it is over, or the end of the lease."""

    peer: str
    fetch: int
    tenant: bytes
    blocks: int
    wanted: list[Span]  # per cache group
    request: Request | None  # until all is computed
    offered: int  # leading blocks that the target has, or that were offered
    table: BlockTable | None = None  # block table of the request, from which chunks were offered
    chunks: int = 0
    held: list[int] = field(default_factory=list)  # the blocks that were offered, referenced for the target
    slots: list[int] = field(default_factory=list)  # with its recurrent state, once it was offered
    uncommitted: list[tuple[int, int]] = field(default_factory=list)  # (step, chunk)
    failed: bool = False


@dataclass(slots=True)
class _Peer:
    number: int  # in orders
    last_received: float
    told: float = 0.0  # the longest time of a step that it was told
    lost: bool = False  # it is forgotten when its last grant ends


class Granter:
    """All grants of one replica. Not thread-safe: the step loop owns it."""

    def __init__(
        self,
        scheduler: Scheduler,
        clock: Callable[[], float],
        predict: Callable[[], tuple[float, float]],
        limits: GrantLimits | None = None,
    ) -> None:
        """predict: seconds to compute a token here, and those of the newest step; 0 = not known yet."""
        self.limits = limits or GrantLimits()
        self.granted = 0  # since boot
        self.computes_for_others = True  # depends on the replica's role
        self._clock = clock
        self._predict = predict
        self.orders: list[Order] = []
        self.messages: list[tuple[str, FromSource]] = []
        self._scheduler = scheduler
        self._kv: KVManager = scheduler.kv
        self._grants: dict[tuple[str, int], Grant] = {}
        self._peers: dict[str, _Peer] = {}
        self._number = 0

    def __len__(self) -> int:
        return len(self._grants)

    def connect(self, peer: str, order: Connect) -> None:
        """A target has connected."""
        self._peers[peer] = _Peer(order.peer, self._clock())
        self.orders.append(order)

    def peer_lost(self, peer: str) -> None:
        """A target's stream is lost: it may still read, until the lease ends."""
        known = self._peers[peer]
        known.lost = True
        for grant in self._grants.values():
            if grant.peer == peer:
                grant.failed = True  # nothing is committed: nobody would read it
                self._stop(grant)
        self._forget_lost(peer)

    def receive(self, peer: str, message: ToSource) -> None:
        """Handles a message of a target."""
        known = self._peers.get(peer)
        if known is None:
            return
        known.last_received = self._clock()
        match message:
            case FetchRequest():
                self._handle_request(peer, message)
            case Renew(number):
                self.messages.append((peer, Renewed(number, self._tell_step(known))))
            case Cancel(fetch) | Done(fetch):
                grant = self._grants.get((peer, fetch))
                if grant is not None:
                    self._end(grant)

    def tick(self) -> None:
        """Handles expired leases."""
        now = self._clock()
        for grant in list(self._grants.values()):
            known = self._peers[grant.peer]
            if now - known.last_received > lease(known.told):
                self._end(grant)

    def planned(self, step: int) -> None:
        """A step is planned, and not launched: blocks that are complete after it are offered.

        Step 0 is a plan without work.
        """
        for grant in list(self._grants.values()):
            request = grant.request
            if request is None:
                continue
            if request.finish is not None or (grant.chunks and request.table is not grant.table):
                self._fail(grant, "the source had to stop computing")  # preempted, or its step failed
            elif request.table is not None:
                grant.table = request.table
                ready = min(request.computed // self._kv.block_size, grant.blocks)
                slot = 0
                if self._kv.states is not None and ready == grant.blocks:
                    slot = self._kv.states.state_after(request.table.state, ready)
                self._offer(grant, request.table.tables, slot, ready, step)

    def processed(self, step: int) -> None:
        """A step's work is done: commits its chunks."""
        for grant in self._grants.values():
            if grant.failed or (grant.request is not None and grant.request.table is not grant.table):
                continue
            while grant.uncommitted and grant.uncommitted[0][0] <= step:
                _, chunk = grant.uncommitted.pop(0)
                self.messages.append((grant.peer, Commit(grant.fetch, chunk)))
            if grant.request is not None and grant.offered == grant.blocks and not grant.uncommitted:
                self._stop(grant)

    def held(self) -> list[int]:
        """Blocks referenced by grants."""
        return [block for grant in self._grants.values() for block in grant.held]

    def held_slots(self) -> list[int]:
        """Slots of recurrent state referenced by grants."""
        return [slot for grant in self._grants.values() for slot in grant.slots]

    # -- internal ---------------------------------------------------------------------------------------------

    def _handle_request(self, peer: str, message: FetchRequest) -> None:
        kv = self._kv
        reason = self._refusal(peer, message)
        if reason:
            self.messages.append((peer, Refused(message.fetch, reason)))
            return
        blocks = len(message.token_ids) // kv.block_size
        chain = kv.start_chain(message.tenant_salt, message.adapter)
        kv.extend_chain(chain, message.token_ids, blocks)
        hit = kv.lookup(chain, len(message.token_ids))
        if message.cached_only and hit.tokens // kv.block_size > message.held:
            blocks = hit.tokens // kv.block_size
        wanted = wanted_blocks(kv.windows, kv.block_size, message.held, blocks, states=kv.states is not None)
        grant = Grant(peer, message.fetch, message.tenant_salt, blocks, wanted, None, message.held)
        complete = hit.tokens == blocks * kv.block_size
        if complete and not message.cached_only:  # else the blocks belong to a stream that was migrated
            self._scheduler.counters.count_lookup(len(message.token_ids), hit.tokens)
        if not complete:
            if message.cached_only or not self._has_room(hit, len(message.token_ids)):
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
                arrival=self._clock(),
                priority=message.priority,
                tenant_salt=message.tenant_salt,
                adapter=message.adapter,
                prefill_only=True,
            )
            self._scheduler.add(grant.request)
        self.granted += 1
        self._grants[peer, message.fetch] = grant
        self.messages.append((peer, Granted(message.fetch, blocks, self._tell_step(self._peers[peer]))))
        if complete:
            self._offer(grant, hit.tables, hit.snapshot, blocks, 0)

    def _tell_step(self, known: _Peer) -> float:
        """What a target is told: the seconds that a step may take."""
        per_token, step = self._predict()
        step = max(step, per_token * self._scheduler.limits.max_num_batched_tokens)
        known.told = max(known.told, step)
        return step

    def _has_room(self, hit: PrefixHit, tokens: int) -> bool:
        """Whether there are enough blocks for one more prompt, beside those of grants that are queued."""
        kv = self._kv
        reserved = sum(
            kv.blocks_for(len(other.request.tokens))
            for other in self._grants.values()
            if other.request is not None and other.request.table is None
        )
        spare = int(kv.pool.total * self.limits.watermark)
        return kv.cost_of(hit, tokens) + reserved + spare <= kv.pool.available

    def _refusal(self, peer: str, message: FetchRequest) -> str:
        if not self.computes_for_others and not message.cached_only:
            return "this replica computes no prompts for others"
        tenant, grants = message.tenant_salt, Counter(grant.tenant for grant in self._grants.values())
        has_grant = has_room(self.limits.max_grants, len(self._grants), grants[tenant], len(grants))
        if not (has_grant and self._scheduler.has_room(tenant, Counter())):
            return "the source is full"
        if (peer, message.fetch) in self._grants:
            return "this fetch was requested already"
        size, tokens = self._kv.block_size, len(message.token_ids)
        if not tokens or tokens % size or not 0 <= message.held < tokens // size:
            return "a fetch is for whole blocks, at least one"
        ahead = self._scheduler.missing_tokens + tokens - message.held * size
        if not message.cached_only and message.timeout and ahead * self._predict()[0] > message.timeout:
            return "the source's queue is too long"
        return ""

    def _offer(self, grant: Grant, tables: Sequence[Sequence[int]], slot: int, ready: int, step: int) -> None:
        """Offers blocks up to `ready` that were not offered yet, of a request's tables. slot: of the state there."""
        first, pool, states = grant.offered, self._kv.pool, self._kv.states
        spans = [(max(start, first), min(stop, ready)) for start, stop in grant.wanted[: len(tables)]]
        blocks = tuple(
            tuple(table[start:stop]) if stop > start else () for table, (start, stop) in zip(tables, spans, strict=True)
        )
        if ready <= first or not any(blocks):
            return  # what no query of the target attends to is offered with the next ones
        if states is not None:
            if ready == grant.blocks and not (slot and states.hold(slot)):
                self._fail(grant, "the source has too few slots for recurrent states")
                return
            grant.slots += [slot] if ready == grant.blocks else []
            blocks += (tuple(grant.slots),)
        for row in blocks[: len(tables)]:
            for block in row:
                pool.acquire(block)
            grant.held += row
        computed = step == 0
        number = self._peers[grant.peer].number
        self.orders.append(Announce(number, grant.fetch, grant.chunks, computed))
        found = grant.blocks if grant.request is None else grant.request.cached_tokens // self._kv.block_size
        cached = min(max(found - first, 0), ready - first)
        self.messages.append((grant.peer, Offer(grant.fetch, grant.chunks, first, ready, blocks, computed, cached)))
        grant.uncommitted.append((step, grant.chunks))
        grant.chunks += 1
        grant.offered = ready
        if computed:
            self.processed(0)

    def _fail(self, grant: Grant, reason: str) -> None:
        """No more will be offered. What the target reads now is held until it answers."""
        self.messages.append((grant.peer, Failed(grant.fetch, reason)))
        grant.failed = True
        self._stop(grant)

    def _stop(self, grant: Grant) -> None:
        """Computes no more for a grant."""
        request, grant.request = grant.request, None
        if request is not None and request.finish is None:
            self._scheduler.end(request, Finish.CANCELLED)

    def _end(self, grant: Grant) -> None:
        """The target does not use what it reads from now on."""
        del self._grants[grant.peer, grant.fetch]
        self._stop(grant)
        self._kv.pool.release(grant.held)
        if self._kv.states is not None:
            self._kv.states.pool.release(grant.slots)
        if grant.chunks:
            self.orders.append(End(self._peers[grant.peer].number, grant.fetch))
        self._forget_lost(grant.peer)

    def _forget_lost(self, peer: str) -> None:
        known = self._peers[peer]
        if known.lost and all(grant.peer != peer for grant in self._grants.values()):
            del self._peers[peer]
            self.orders.append(Disconnect(known.number))

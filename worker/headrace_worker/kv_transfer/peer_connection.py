"""Transfers one pair's chunks on its own thread, in the order in which they were queued."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import structlog
import torch
from blake3 import blake3
from torch import Tensor

from headrace_proto.errors import HeadraceError
from headrace_worker.comm.group import Receiving, Sending
from headrace_worker.comm.rendezvous import RendezvousHost
from headrace_worker.core.transfer.orders import OpenPair, PairFailed, Receive, Received, Send, Sent, TransferReport
from headrace_worker.core.transfer.shards import KvShards, Route
from headrace_worker.device.rank_device import Mark, RankDevice
from headrace_worker.kv_transfer.chunk_bytes import (
    TRAILER_BYTES,
    PieceMac,
    Trailer,
    new_piece,
    read_blocks,
    upload_index,
    write_blocks,
)
from headrace_worker.kv_transfer.pair_group import PairGroup
from headrace_worker.kv_transfer.send_clock import SendClock
from headrace_worker.model.attention import LayerCache

log = structlog.get_logger(__name__)


class ChunkOrderError(HeadraceError):
    """The two ends of a pair disagree about which chunk is next."""


class LayerGate(Protocol):
    """Opens layer by layer as a step progresses."""

    def wait(self, layer: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Task:
    """A chunk to transfer, and on a GPU the end of everything launched before: until then its blocks are in use."""

    order: Send | Receive
    gate: LayerGate | None
    launched: Mark


class PeerConnection:
    """One rank's end of a pair. A failure of the pair ends the connection and is reported; its chunks fail."""

    def __init__(
        self,
        order: OpenPair,
        rank: int,
        host: str,
        shards: KvShards,
        caches: Mapping[int, LayerCache],
        device: RankDevice,
        report: Callable[[TransferReport], None],
        check: Callable[[], None] = lambda: None,
        opened: RendezvousHost | None = None,
    ) -> None:
        """`check` raises if blocks must not be sent. `opened`: the pair's rendezvous, on rank 0 of the target."""
        self._order = order
        self._rank = rank
        self._host = host
        self._caches = caches
        self._report = report
        self._check = check
        self._opened = opened
        self._first_head = shards.ranks[rank].heads[0]
        mine = [route for route in order.routes if (route.source if order.sends else route.target) == rank]
        self._routes: list[Route] = sorted(mine, key=lambda route: route.target if order.sends else route.source)
        self._device = device
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        # Held while blocks are read or written, and not during copies to and from the host: the step thread takes it.
        self._lock = threading.Lock()
        self._queued_chunks: dict[int, int] = {}  # fetch -> chunks that are queued and not transferred
        self._closed = False
        self._pair_group: PairGroup | None = None
        self._thread = threading.Thread(target=self._run, name=f"headrace-pair-{order.pair}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def enqueue(self, order: Send | Receive, gate: LayerGate | None) -> None:
        """Queue the pair's next chunk; a layer can be read once the gate opens for it."""
        if not isinstance(order, Receive) or order.blocks:
            with self._lock:
                self._queued_chunks[order.fetch] = self._queued_chunks.get(order.fetch, 0) + 1
        self._queue.put(_Task(order, gate, self._device.mark()))

    def drop(self, fetch: int) -> None:
        """Stop a fetch: when this returns, none of its blocks is read or written any more."""
        with self._lock:
            self._queued_chunks.pop(fetch, None)

    def close(self) -> None:
        """Stop all fetches: when this returns, none of their blocks is read or written. The thread ends by itself."""
        with self._lock:
            self._queued_chunks.clear()
            self._closed = True
        self._queue.put(None)
        if self._pair_group is not None:
            self._pair_group.close()

    def _run(self) -> None:
        self._device.use()
        # Copies must not queue behind the running step: layers are marked when they can be read, and blocks that are
        # written are not read before they are reported.
        with self._device.own_stream():
            self._transfer_all()

    def _transfer_all(self) -> None:
        try:
            pair_group = PairGroup(self._order, self._rank, self._host, self._opened)
            with self._lock:
                self._pair_group = pair_group
                closed = self._closed
            try:
                while not closed and (task := self._queue.get()) is not None:
                    if isinstance(task.order, Send):
                        task.launched.synchronize()  # not part of the time that it takes to send
                        self._check()
                        self._send(pair_group, task.order, task.gate)
                    else:
                        self._device.wait_for(task.launched)
                        self._receive(pair_group, task.order)
            finally:
                pair_group.close()
        except Exception as error:
            if not self._closed:
                log.warning("kv_pair_lost", pair=self._order.pair, rank=self._rank, error=str(error)[:200])
                self._report(PairFailed(self._rank, self._order.pair, str(error)[:200]))
        self._fail_queued()

    def _fail_queued(self) -> None:
        """Report the chunks that remain in the queue as failed."""
        while True:
            try:
                task = self._queue.get_nowait()
            except queue.Empty:
                return
            if task is not None and isinstance(task.order, Receive):
                self._report_received(task.order, 0, good=False)

    def _send(self, pair_group: PairGroup, order: Send, gate: LayerGate | None) -> None:
        clock = SendClock()
        for route in self._routes:
            mac = PieceMac(self._key(route))
            complete = True
            sending: Sending | None = None
            for group, layers in enumerate(route.layers):
                blocks = order.blocks[group]
                if not blocks:
                    continue
                heads = self._local_heads(route)
                for layer in layers:
                    if gate is not None:
                        with clock.paused():
                            gate.wait(layer)
                        self._check()
                    pool, found = self._caches[layer].pool, None
                    index = upload_index(self._device, blocks)
                    with self._lock:
                        complete = complete and order.fetch in self._queued_chunks
                        if complete:
                            found = read_blocks(self._device, pool, index, heads)
                    if found is not None:
                        (piece,) = self._device.download([found]).wait()
                    else:  # the receiver expects a piece: send zeros, and mark the trailer as incomplete
                        piece = new_piece(self._device, pool, len(blocks), heads[1] - heads[0]).zero_()
                    mac.add(piece)
                    if sending is not None:
                        pair_group.finish(sending)
                        clock.sent(sending.tensor.nbytes)
                    sending = pair_group.send(piece, route.target)
            if sending is not None:
                pair_group.finish(sending)
                clock.sent(sending.tensor.nbytes)
            trailer = mac.trailer(order.fetch, order.chunk, complete=complete)
            pair_group.finish(pair_group.send(trailer.encode(), route.target))
        most = max(len(row) for row in order.blocks)
        self._report(Sent(self._rank, self._order.pair, most, clock.seconds))
        self._count_transferred(order.fetch)

    def _receive(self, pair_group: PairGroup, order: Receive) -> None:
        good, num_bytes = True, 0
        try:
            for route in self._routes:
                mac = self._receive_pieces(pair_group, order, route)
                raw = torch.empty(TRAILER_BYTES, dtype=torch.uint8)
                pair_group.take(pair_group.expect(raw, route.source))
                trailer = Trailer.decode(raw)
                if (trailer.fetch, trailer.chunk) != (order.fetch, order.chunk):
                    raise ChunkOrderError(
                        "the peer sent another chunk than the expected one: update both replicas to one release"
                    )
                num_bytes += mac.num_bytes
                good = good and trailer.equals(mac.trailer(order.fetch, order.chunk, complete=True))
        except Exception:
            self._report_received(order, num_bytes, good=False)
            raise
        self._count_transferred(order.fetch)
        self._report_received(order, num_bytes, good=good)

    def _receive_pieces(self, pair_group: PairGroup, order: Receive, route: Route) -> PieceMac:
        """A chunk's pieces on one route. While one is written into its blocks, the next is being received."""
        mac = PieceMac(self._key(route))
        heads = self._local_heads(route)
        parts = [(group, layer) for group, layers in enumerate(route.layers) for layer in layers if order.counts[group]]
        incoming: deque[tuple[Tensor, Receiving]] = deque()

        def expect(place: int) -> None:
            if place < len(parts):
                group, layer = parts[place]
                piece = new_piece(self._device, self._caches[layer].pool, order.counts[group], heads[1] - heads[0])
                incoming.append((piece, pair_group.expect(piece, route.source)))

        expect(0)
        for place, (group, layer) in enumerate(parts):
            piece, receiving = incoming.popleft()
            pair_group.take(receiving)
            expect(place + 1)
            mac.add(piece)
            if not order.blocks:
                continue
            index, uploaded = upload_index(self._device, order.blocks[group]), self._device.upload(piece)
            self._device.mark().synchronize()  # also of the steps that were launched before the order
            with self._lock:
                if order.fetch in self._queued_chunks:
                    write_blocks(self._device, self._caches[layer].pool, index, heads, uploaded)
        return mac

    def _report_received(self, order: Receive, num_bytes: int, *, good: bool) -> None:
        self._report(Received(self._rank, order.pair, order.fetch, order.chunk, good, num_bytes))

    def _count_transferred(self, fetch: int) -> None:
        """A chunk of the fetch is transferred."""
        with self._lock:
            left = self._queued_chunks.get(fetch, 1) - 1
            if left > 0:
                self._queued_chunks[fetch] = left
            else:
                self._queued_chunks.pop(fetch, None)

    def _key(self, route: Route) -> bytes:
        """The MAC key of a route: other routes and other pairs have other keys."""
        context = f"headrace 2026 kv from {route.source} to {route.target}"
        return blake3(self._order.rendezvous.token, derive_key_context=context).digest()

    def _local_heads(self, route: Route) -> tuple[int, int]:
        return route.heads[0] - self._first_head, route.heads[1] - self._first_head

"""Carries one pair's chunks on a thread of its own, in the order in which they were put."""

import contextlib
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import structlog
import torch
from torch import Tensor

from headrace_proto.errors import HeadraceError
from headrace_worker.model.attention import LayerCache
from headrace_worker.parallel.group import Receiving, Sending
from headrace_worker.parallel.meeting import MeetingHost
from headrace_worker.transfer.orders import OpenPair, PairFailed, Receive, Received, Report, Send
from headrace_worker.transfer.parcel import TRAILER_BYTES, Tally, Trailer, new_piece, read_blocks, write_blocks
from headrace_worker.transfer.shards import KvShards, Route
from headrace_worker.transfer.wire import Wire

log = structlog.get_logger(__name__)


class OutOfStepError(HeadraceError):
    """The two ends of a pair do not agree on which chunk is next."""


class LayerGate(Protocol):
    """Opens layer by layer as a step goes on."""

    def wait(self, layer: int) -> None: ...


@dataclass(frozen=True, slots=True)
class _Task:
    """A chunk to carry, and on a GPU the end of all that was launched before it: until then its blocks are in use."""

    order: Send | Receive
    gate: LayerGate | None
    launched: torch.cuda.Event | None


class Carrier:
    """One rank's end of a pair. A failure of the pair ends the carrier, and is reported; chunks left are not good."""

    def __init__(
        self,
        order: OpenPair,
        rank: int,
        host: str,
        shards: KvShards,
        caches: Mapping[int, LayerCache],
        report: Callable[[Report], None],
    ) -> None:
        self._order = order
        self._rank = rank
        self._host = host
        self._caches = caches
        self._report = report
        self._first_head = shards.ranks[rank].heads[0]
        mine = [route for route in order.routes if (route.source if order.sends else route.target) == rank]
        self._routes: list[Route] = sorted(mine, key=lambda route: route.target if order.sends else route.source)
        self._device = next((cache.pool.device for cache in caches.values()), torch.device("cpu"))
        self._queue: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # held while blocks are read or written
        self._live: dict[int, int] = {}  # fetch -> chunks that are put and not carried
        self._closed = False
        self._wire: Wire | None = None
        self._thread = threading.Thread(target=self._run, name=f"headrace-pair-{order.pair}", daemon=True)

    def start(self, opened: MeetingHost | None) -> None:
        self._opened = opened
        self._thread.start()

    def put(self, order: Send | Receive, gate: LayerGate | None) -> None:
        """The pair's next chunk; its layers can be read once the gate lets them through."""
        if not isinstance(order, Receive) or order.blocks:
            with self._lock:
                self._live[order.fetch] = self._live.get(order.fetch, 0) + 1
        self._queue.put(_Task(order, gate, _launched(self._device)))

    def drop(self, fetch: int) -> None:
        """When this returns, no block of the fetch is read or written any more."""
        with self._lock:
            self._live.pop(fetch, None)

    def close(self) -> None:
        """When this returns, no block of any fetch is read or written any more. The thread ends by itself."""
        with self._lock:
            self._live.clear()
            self._closed = True
        self._queue.put(None)
        if self._wire is not None:
            self._wire.close()

    def _run(self) -> None:
        with _own_stream(self._device):
            self._carry_all()

    def _carry_all(self) -> None:
        try:
            wire = Wire(self._order, self._rank, self._host, self._opened)
            with self._lock:
                self._wire = wire
                closed = self._closed
            try:
                while not closed and (task := self._queue.get()) is not None:
                    if task.launched is not None:  # pragma: no cover - needs a GPU
                        torch.cuda.current_stream(self._device).wait_event(task.launched)
                    if isinstance(task.order, Send):
                        self._send(wire, task.order, task.gate)
                    else:
                        self._receive(wire, task.order)
            finally:
                wire.close()
        except Exception as error:
            if not self._closed:
                log.warning("kv_pair_lost", pair=self._order.pair, rank=self._rank, error=str(error)[:200])
                self._report(PairFailed(self._rank, self._order.pair, str(error)[:200]))
        self._refuse_rest()

    def _refuse_rest(self) -> None:
        """Chunks that nobody will receive."""
        while True:
            try:
                task = self._queue.get_nowait()
            except queue.Empty:
                return
            if task is not None and isinstance(task.order, Receive):
                self._done(task.order, 0, good=False)

    def _send(self, wire: Wire, order: Send, gate: LayerGate | None) -> None:
        for route in self._routes:
            tally = Tally()
            whole = True
            going: Sending | None = None
            for group, layers in enumerate(route.layers):
                blocks = order.blocks[group]
                if not blocks:
                    continue
                heads = self._local(route)
                for layer in layers:
                    if gate is not None:
                        gate.wait(layer)
                    pool = self._caches[layer].pool
                    with self._lock:
                        whole = whole and order.fetch in self._live
                        if whole:
                            piece = read_blocks(pool, blocks, heads)
                        else:  # the receiver counts on a piece: it gets zeros, and is told
                            piece = new_piece(pool, len(blocks), heads[1] - heads[0]).zero_()
                    tally.add(piece)
                    if going is not None:
                        wire.finish(going)
                    going = wire.send(piece, route.target)
            if going is not None:
                wire.finish(going)
            trailer = Trailer(order.fetch, order.chunk, whole, tally.num_bytes, tally.checksum)
            wire.finish(wire.send(trailer.encode(), route.target))
        self._forget(order.fetch)

    def _receive(self, wire: Wire, order: Receive) -> None:
        good, num_bytes = True, 0
        try:
            for route in self._routes:
                tally = self._receive_pieces(wire, order, route)
                raw = torch.empty(TRAILER_BYTES, dtype=torch.uint8)
                wire.take(wire.expect(raw, route.source))
                trailer = Trailer.decode(raw)
                if (trailer.fetch, trailer.chunk) != (order.fetch, order.chunk):
                    raise OutOfStepError(
                        "the peer sent another chunk than the one that is due: update both replicas to one release"
                    )
                good = good and trailer == Trailer(order.fetch, order.chunk, True, tally.num_bytes, tally.checksum)
                num_bytes += tally.num_bytes
        except Exception:
            self._done(order, num_bytes, good=False)
            raise
        self._forget(order.fetch)
        self._done(order, num_bytes, good=good)

    def _receive_pieces(self, wire: Wire, order: Receive, route: Route) -> Tally:
        """A chunk's pieces on one route. While one is written into its blocks, the next is on its way."""
        tally = Tally()
        heads = self._local(route)
        parts = [(group, layer) for group, layers in enumerate(route.layers) for layer in layers if order.counts[group]]
        coming: deque[tuple[Tensor, Receiving]] = deque()

        def expect(place: int) -> None:
            if place < len(parts):
                group, layer = parts[place]
                piece = new_piece(self._caches[layer].pool, order.counts[group], heads[1] - heads[0])
                coming.append((piece, wire.expect(piece, route.source)))

        expect(0)
        for place, (group, layer) in enumerate(parts):
            piece, receiving = coming.popleft()
            wire.take(receiving)
            expect(place + 1)
            tally.add(piece)
            with self._lock:
                if order.fetch in self._live:
                    write_blocks(self._caches[layer].pool, order.blocks[group], heads, piece)
        return tally

    def _done(self, order: Receive, num_bytes: int, *, good: bool) -> None:
        self._report(Received(self._rank, order.pair, order.fetch, order.chunk, good, num_bytes))

    def _forget(self, fetch: int) -> None:
        """A chunk is carried."""
        with self._lock:
            left = self._live.get(fetch, 1) - 1
            if left > 0:
                self._live[fetch] = left
            else:
                self._live.pop(fetch, None)

    def _local(self, route: Route) -> tuple[int, int]:
        return route.heads[0] - self._first_head, route.heads[1] - self._first_head


def _launched(device: torch.device) -> torch.cuda.Event | None:
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]  # pragma: no cover - needs a GPU
    event.record(torch.cuda.current_stream(device))  # pragma: no cover
    return event  # pragma: no cover


def _own_stream(device: torch.device) -> contextlib.AbstractContextManager[object]:
    """On a GPU copies must not queue behind the step that runs: what they read is marked layer by layer, and what they
    write nobody reads before it is reported.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    return torch.cuda.stream(torch.cuda.Stream(device))  # type: ignore[no-untyped-call]  # pragma: no cover

"""A rank's transfer worker: receives orders in the step thread, and executes them on one thread per pair.

    plan's orders ─▶ TransferWorker ─┬─▶ PeerConnection of pair 1 ── PairGroup ── other replica
                written(layer) ──▶   └─▶ PeerConnection of pair 2 ── PairGroup ── other replica
    peer connections ──▶ reports ──▶ rank 0

A chunk that is sent while its step still runs is sent layer by layer, each as soon as its keys and values are written.
"""

import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from headrace_worker.comm.rendezvous import RendezvousHost
from headrace_worker.core.transfer.orders import ClosePair, Drop, OpenPair, Order, Receive, Send, TransferReport
from headrace_worker.core.transfer.shards import KvShards
from headrace_worker.device.rank_device import Mark, RankDevice
from headrace_worker.kv_transfer.peer_connection import PeerConnection
from headrace_worker.model.attention import LayerCache


class WrittenLayers:
    """Which layers of a running step have stored their keys and values: set by the step thread, awaited by senders."""

    def __init__(self, layers: Sequence[int], device: RankDevice) -> None:
        self._device = device
        self._done = {layer: threading.Event() for layer in layers}
        self._marks: dict[int, Mark] = {}

    def mark(self, layer: int, values: Tensor) -> None:
        """Mark a layer as written, once what its thread has launched is done."""
        if not self._done[layer].is_set():
            self._marks[layer] = self._device.mark()
            self._done[layer].set()

    def wait(self, layer: int) -> None:
        """Wait until the layer's blocks can be read."""
        self._done[layer].wait()
        self._marks[layer].synchronize()


class TransferWorker:
    """KV transfers of one rank. `begin_step` and `end_step` are for the step thread, `stop` for any."""

    def __init__(
        self,
        rank: int,
        host: str,
        shards: KvShards,
        caches: dict[int, LayerCache],
        device: RankDevice,
        report: Callable[[TransferReport], None],
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """`report` is called on the threads of the connections.

        `check` raises once what this rank computes may not be valid: a step of a lost group does not fail by itself.
        """
        self.shards = shards
        self._rank = rank
        self._host = host
        self._caches = caches
        self._device = device
        self._report = report
        self._check = check
        self._connections: dict[int, PeerConnection] = {}
        self._opened: dict[int, RendezvousHost] = {}
        self._written: WrittenLayers | None = None

    def set_rendezvous_host(self, pair: int, host: RendezvousHost) -> None:
        """On rank 0 of the target: the pair's rendezvous. Called before the pair's order; from any thread."""
        self._opened[pair] = host

    def begin_step(self, orders: Sequence[Order], *, computes: bool) -> Callable[[int, Tensor], None] | None:
        """Starts a plan's orders, before its work. Returns what to call as each layer is written, if a sender waits."""
        if computes and any(isinstance(order, Send) for order in orders):
            self._written = WrittenLayers(list(self._caches), self._device)
        for order in orders:
            match order:
                case OpenPair():
                    connection = PeerConnection(
                        order,
                        self._rank,
                        self._host,
                        self.shards,
                        self._caches,
                        self._device,
                        self._report,
                        self._check,
                        self._opened.pop(order.pair, None),
                    )
                    self._connections[order.pair] = connection
                    connection.start()
                case ClosePair(pair):
                    closed = self._connections.pop(pair, None)
                    if closed is not None:
                        closed.close()
                case Drop(pair, fetch):
                    if pair in self._connections:
                        self._connections[pair].drop(fetch)
                case Send() | Receive():
                    if order.pair in self._connections:
                        self._connections[order.pair].enqueue(order, self._written)
        return self._written.mark if self._written is not None else None

    def end_step(self) -> None:
        """The step's work is over, whether or not each layer was marked: release all waits for layers."""
        written, self._written = self._written, None
        if written is not None:
            for layer, cache in self._caches.items():
                written.mark(layer, cache.pool)

    def stop(self) -> None:
        """Ends all pairs. Idempotent."""
        for connection in list(self._connections.values()):
            connection.close()
        self._connections.clear()

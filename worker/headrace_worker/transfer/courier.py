"""A rank's courier: takes orders in the step thread, and carries them out on a thread per pair.

    plan's orders ──▶ Courier ──▶ Carrier of pair 1 ── wire ── other replica      written(layer) ──▶ pieces that waited
                          └─────▶ Carrier of pair 2 ── wire ── another one
    carriers ──▶ reports ──▶ rank 0

A chunk that is sent while its step still runs goes out layer by layer, each as soon as the layer's keys and values
are written.
"""

import threading
from collections.abc import Callable, Sequence

import structlog
import torch
from torch import Tensor

from headrace_worker.model.attention import LayerCache
from headrace_worker.parallel.meeting import MeetingHost
from headrace_worker.transfer.carrier import Carrier
from headrace_worker.transfer.orders import ClosePair, Drop, OpenPair, Order, Receive, Report, Send
from headrace_worker.transfer.shards import KvShards

log = structlog.get_logger(__name__)


class WrittenLayers:
    """Which layers of a running step have stored their keys and values. Set by the step thread, awaited by carriers."""

    def __init__(self, layers: Sequence[int]) -> None:
        self._done = {layer: threading.Event() for layer in layers}
        self._marks: dict[int, torch.cuda.Event] = {}

    def mark(self, layer: int, values: Tensor) -> None:
        """The layer's writes are done, or on a GPU, ordered."""
        if values.is_cuda:  # pragma: no cover - needs a GPU
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            self._marks[layer] = event
        self._done[layer].set()

    def wait(self, layer: int) -> None:
        """Until the layer's blocks can be read."""
        self._done[layer].wait()
        mark = self._marks.get(layer)
        if mark is not None:  # pragma: no cover - needs a GPU
            mark.synchronize()


class Courier:
    """Of one rank. `take` and `end_step` belong to the step thread, `stop` to any."""

    def __init__(
        self,
        rank: int,
        host: str,
        shards: KvShards,
        caches: dict[int, LayerCache],
    ) -> None:
        self.shards = shards
        self._rank = rank
        self._host = host
        self._caches = caches
        self.report: Callable[[Report], None] = lambda report: None  # set before the first order comes
        self._carriers: dict[int, Carrier] = {}
        self._opened: dict[int, MeetingHost] = {}
        self._written: WrittenLayers | None = None

    def opened(self, pair: int, host: MeetingHost) -> None:
        """Of rank 0 of the target: where the pair meets. Before the pair's order; from any thread."""
        self._opened[pair] = host

    def take(self, orders: Sequence[Order], works: bool) -> Callable[[int, Tensor], None] | None:
        """Takes a plan's orders, before its work. What to call as each layer is written, if anybody waits for that."""
        if works and any(isinstance(order, Send) for order in orders):
            self._written = WrittenLayers(list(self._caches))
        for order in orders:
            match order:
                case OpenPair():
                    carrier = Carrier(order, self._rank, self._host, self.shards, self._caches, self.report)
                    self._carriers[order.pair] = carrier
                    carrier.start(self._opened.pop(order.pair, None))
                case ClosePair(pair):
                    gone = self._carriers.pop(pair, None)
                    if gone is not None:
                        gone.close()
                case Drop(pair, fetch):
                    if pair in self._carriers:
                        self._carriers[pair].drop(fetch)
                case Send() | Receive():
                    if order.pair in self._carriers:
                        self._carriers[order.pair].put(order, self._written)
        return self._written.mark if self._written is not None else None

    def end_step(self, pools: Sequence[Tensor]) -> None:
        """The step's work is over, whether or not each layer said so; who waits for one need not any more."""
        written, self._written = self._written, None
        if written is not None:
            for layer in self._caches:
                written.mark(layer, pools[0])

    def stop(self) -> None:
        """Ends all pairs. Idempotent."""
        for carrier in list(self._carriers.values()):
            carrier.close()
        self._carriers.clear()

"""A rank's transfer worker: takes orders in the step thread, and executes them on a thread of its own.

    plan's orders ──▶ TransferWorker ◀──▶ KvAgent ◀── NIXL ──▶ agents of other replicas' ranks
    written(layer) ──▶     │
                           └──▶ reports ──▶ rank 0

As the source it notifies the target's ranks of each slice of layers that a step has computed; as the target it reads a
slice when its source has. A read is over when NIXL says so: nothing stops it before. Its file is read and written by a
few threads more.
"""

import queue
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

import structlog
from torch import Tensor

from headrace_worker.core.transfer.orders import (
    Announce,
    ChunkRead,
    Connect,
    Disconnect,
    End,
    Erase,
    FetchOver,
    FileBlock,
    Fill,
    Load,
    Order,
    Read,
    Save,
    Store,
    TransferReport,
)
from headrace_worker.core.transfer.shards import KvShards, RankShard, Route
from headrace_worker.device.rank_device import Mark, RankDevice
from headrace_worker.kv_transfer.agent import KvAgent, ReadFailedError, Reading
from headrace_worker.kv_transfer.offload_file import OffloadFile
from headrace_worker.kv_transfer.pieces import Layers, joined, layer_slices, pieces

log = structlog.get_logger(__name__)

POLL_SECONDS = 5e-5
FILE_POLL_SECONDS = 5e-4  # while its file alone is used
SELF = 0  # peer number of this rank
FILE_THREADS = 2
FILE_SECONDS = 3.0  # that the end waits for a block that is being read or written
MAX_ENDED = 1024  # fetches of which notices may still arrive
_NOTICE = struct.Struct("<QII")  # fetch, chunk, slice

Notice = tuple[int, int, int]


class WrittenLayers:
    """Which layers of a running step have stored their keys and values: set by the step thread."""

    def __init__(self, device: RankDevice) -> None:
        self._device = device
        self._marks: dict[int, Mark] = {}
        self._end: Mark | None = None

    def mark(self, layer: int, _values: Tensor | None = None) -> None:
        """A layer is written, once what its thread has launched is done."""
        self._marks.setdefault(layer, self._device.mark())

    def end(self) -> None:
        """The step's work is launched, whether or not each layer was marked."""
        self._end = self._device.mark()

    def holds(self, layer: int) -> bool:
        """Whether the layer's blocks can be read."""
        mark = self._marks.get(layer, self._end)
        return mark is not None and mark.query()


@dataclass(slots=True)
class _Peer:
    """The ranks of another replica with which this one shares routes."""

    order: Connect
    routes: list[Route]
    agents: dict[int, str]  # names, by rank
    slices: list[list[Layers]]  # by route


@dataclass(slots=True)
class _Announcing:
    """A chunk whose layers a step computes: what the targets were not notified of yet, by route."""

    order: Announce
    written: WrittenLayers
    left: list[list[int]]  # slices


@dataclass(slots=True)
class _Reading:
    """A chunk that is being read, or copied within this rank."""

    order: Read | Load | Store
    key: tuple[int, int]  # peer, fetch
    launched: Mark  # until then its blocks are in use by steps
    left: set[tuple[int, int]]  # (route, slice) whose read has not begun
    under_way: list[Reading] = field(default_factory=list)
    num_bytes: int = 0
    seconds: float = 0.0
    busy_since: float | None = None
    failed: bool = False


@dataclass(frozen=True, slots=True)
class HostMemory:
    """The host memory and file of one rank, for evicted blocks."""

    shard: RankShard  # laid out like its blocks
    parts: Callable[[int, int], list[memoryview]]  # bytes of a cache group's slot, in the same order in every process
    file: OffloadFile | None


@dataclass(slots=True)
class _Filing:
    """Blocks that go to the rank's file or come from it."""

    fetch: int
    parts: list[Future[list[int]]]  # places that were not written, or do not hold what they should
    began: float


class TransferWorker:
    """KV transfers of one rank. `begin_step` and `end_step` are for the step thread, `stop` for any."""

    def __init__(
        self,
        rank: int,
        shards: KvShards,
        agent: KvAgent,
        device: RankDevice,
        report: Callable[[TransferReport], None],
        check: Callable[[], None] = lambda: None,
        host: HostMemory | None = None,
    ) -> None:
        """shards: with the memory of all ranks. `report` is called on the worker's thread.

        `check` raises once what this rank computes may not be valid: a step of a lost group does not fail by itself.
        """
        self.shards = shards
        self._rank = rank
        self._agent = agent
        self._device = device
        self._report = report
        self._check = check
        self.on_failure: Callable[[str], None] = lambda sentence: None  # the rank must end then
        self._written: WrittenLayers | None = None
        self._orders: queue.SimpleQueue[tuple[Order, WrittenLayers | None, Mark] | None] = queue.SimpleQueue()
        # State of the worker's thread:
        self._peers: dict[int, _Peer] = {}
        self._host = host or HostMemory(RankShard(()), lambda group, slot: [], None)  # which no order names
        whole = Route(rank, rank, shards.ranks[rank].groups)
        self._self = _Peer(Connect(SELF, (), (), True), [whole], {rank: agent.name}, [layer_slices(whole)])
        self._closing: list[_Peer] = []  # to be forgotten when nothing is read from them
        self._served: set[tuple[int, int]] = set()  # fetches of targets
        self._announcing: list[_Announcing] = []
        self._reading: list[_Reading] = []
        self._filing: list[_Filing] = []
        self._saving = ThreadPoolExecutor(1, "headrace-save")
        self._filling = ThreadPoolExecutor(FILE_THREADS, "headrace-fill")  # separate threads: requests wait for fills
        self._ended: list[tuple[int, int]] = []  # fetches whose last reads are under way
        self._notices: dict[int, set[tuple[str, Notice]]] = {}  # by fetch
        self._thread = threading.Thread(target=self._run, name="headrace-transfers", daemon=True)
        self._thread.start()

    def begin_step(self, orders: Sequence[Order], *, computes: bool) -> Callable[[int, Tensor], None] | None:
        """Takes a plan's orders, before its work. Returns what to call as each layer is written, if a target waits."""
        if computes and any(isinstance(order, Announce) for order in orders):
            self._written = WrittenLayers(self._device)
        launched = self._device.mark()
        for order in orders:
            self._orders.put((order, self._written, launched))
        return self._written.mark if self._written is not None else None

    def end_step(self) -> None:
        """The step's work is launched."""
        written, self._written = self._written, None
        if written is not None:
            written.end()

    def stop(self, seconds: float = 5.0) -> None:
        """Ends the thread, once no read is under way or the time has passed. Idempotent."""
        self._orders.put(None)
        self._thread.join(seconds)

    # -- on the worker's thread -----------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._run_orders()
        except Exception as error:  # a bug, or a device that is lost: reads would never end
            log.exception("kv_transfers_failed", rank=self._rank)
            self.on_failure(f"the transfer thread failed: {error}")

    def _run_orders(self) -> None:
        self._device.use()
        stopping = False
        while not stopping or self._reading:
            reads = self._served or self._announcing or self._reading or self._closing
            idle = not (reads or self._filing or stopping)
            try:
                entry = self._orders.get(block=idle)
            except queue.Empty:
                self._progress()
                time.sleep(POLL_SECONDS if reads else FILE_POLL_SECONDS)
                continue
            if entry is None:
                stopping = True
                for reading in self._reading:
                    reading.failed = True
            elif not stopping:
                self._take(*entry)
        for threads in (self._saving, self._filling):
            threads.shutdown(wait=False, cancel_futures=True)
        wait([part for filing in self._filing for part in filing.parts], FILE_SECONDS)
        if self._host.file is not None:
            self._host.file.close()
        self._agent.close()

    def _take(self, order: Order, written: WrittenLayers | None, launched: Mark) -> None:
        match order:
            case Connect():
                self._peers[order.peer] = self._connect(order)
            case Disconnect(peer):
                self._closing.append(self._peers.pop(peer))
            case Announce(peer, fetch, computed=computed):
                self._served.add((peer, fetch))
                if not computed and written is not None:
                    waiting = [list(range(len(each))) for each in self._peers[peer].slices]
                    self._announcing.append(_Announcing(order, written, waiting))
            case Read() | Load() | Store():
                number = order.peer if isinstance(order, Read) else SELF
                slices = self._peer(number).slices
                left = {(route, place) for route, each in enumerate(slices) for place in range(len(each))}
                self._reading.append(_Reading(order, (number, order.fetch), launched, left))
            case Save(fetch, blocks):
                self._filing.append(_Filing(fetch, [self._saving.submit(self._save, blocks)], time.monotonic()))
            case Erase(places):
                self._saving.submit(self._erase, places)
            case Fill(fetch, blocks):
                parts = [blocks[first::FILE_THREADS] for first in range(FILE_THREADS)]
                futures = [self._filling.submit(self._fill, part) for part in parts]
                self._filing.append(_Filing(fetch, futures, time.monotonic()))
            case End(peer, fetch):
                self._served.discard((peer, fetch))
                self._announcing = [
                    each for each in self._announcing if (each.order.peer, each.order.fetch) != (peer, fetch)
                ]
                if self._peers[peer].order.reads:
                    self._ended.append((peer, fetch))
                    for reading in self._reading:
                        reading.failed = reading.failed or reading.key == (peer, fetch)
        self._progress()

    def _connect(self, order: Connect) -> _Peer:
        mine = [route for route in order.routes if (route.target if order.reads else route.source) == self._rank]
        peer = _Peer(order, mine, {}, [layer_slices(route) for route in mine])
        for route in mine:
            other = route.source if order.reads else route.target
            try:
                peer.agents[other] = self._agent.connect(order.ranks[other].agent)
            except ReadFailedError as error:  # each read fails then
                log.warning("kv_peer_unreachable", rank=self._rank, error=str(error))
        return peer

    def _progress(self) -> None:
        for sender, notice in self._agent.notices():
            fetch, chunk, place = _NOTICE.unpack(notice)
            self._notices.setdefault(fetch, set()).add((sender, (fetch, chunk, place)))
        while len(self._notices) > MAX_ENDED:
            del self._notices[next(iter(self._notices))]
        self._announcing = [each for each in self._announcing if self._announce(each)]
        self._reading = [each for each in self._reading if self._read(each)]
        for filing in [each for each in self._filing if all(part.done() for part in each.parts)]:
            self._filing.remove(filing)
            bad, seconds = [place for part in filing.parts for place in part.result()], time.monotonic() - filing.began
            self._report(ChunkRead(self._rank, filing.fetch, 0, not bad, 0, seconds, tuple(bad)))
        for key in [key for key in self._ended if all(each.key != key for each in self._reading)]:
            self._ended.remove(key)
            self._notices.pop(key[1], None)
            self._report(FetchOver(self._rank, key[1]))
        for peer in [peer for peer in self._closing if all(each.key[0] != peer.order.peer for each in self._reading)]:
            self._closing.remove(peer)
            for name in peer.agents.values():
                self._agent.disconnect(name)

    def _announce(self, each: _Announcing) -> bool:
        """Notifies the targets of what is computed. Returns whether more will be."""
        peer = self._peers.get(each.order.peer)
        if peer is None:
            return False
        for route, layers, left in zip(peer.routes, peer.slices, each.left, strict=True):
            while left and all(each.written.holds(route.groups[group].layers[at]) for group, at in layers[left[0]]):
                try:
                    self._check()
                except Exception:  # what was computed may be invalid: the target waits until this replica is lost
                    return False
                notice = _NOTICE.pack(each.order.fetch, each.order.chunk, left.pop(0))
                self._agent.notify(peer.agents.get(route.target, ""), notice)
        return any(each.left)

    def _read(self, each: _Reading) -> bool:
        """Begins the reads that can begin, and ends those that are over. Returns whether there are more."""
        if not each.failed and each.left and each.launched.query():
            for route, place in sorted(each.left):
                if not each.failed and self._can_read(each.order, route, place):
                    each.left.discard((route, place))
                    self._begin_read(each, route, place)
        over = []
        for reading in each.under_way:
            try:
                if reading.done():
                    over.append(reading)
            except ReadFailedError:
                over.append(reading)
                each.failed = True
        each.under_way = [reading for reading in each.under_way if reading not in over]
        if each.busy_since is not None and not each.under_way:
            each.seconds += time.monotonic() - each.busy_since
            each.busy_since = None
        if (each.left and not each.failed) or each.under_way:
            return True
        chunk = each.order.chunk if isinstance(each.order, Read) else 0
        if each.key not in self._ended:
            self._report(ChunkRead(self._rank, each.key[1], chunk, not each.failed, each.num_bytes, each.seconds))
        return False

    def _can_read(self, order: Read | Load | Store, route: int, place: int) -> bool:
        if not isinstance(order, Read) or order.computed:
            return True
        peer = self._peers[order.peer]
        entry = (peer.agents.get(peer.routes[route].source, ""), (order.fetch, order.chunk, place))
        notices = self._notices.get(order.fetch, set())
        if entry not in notices:
            return not entry[0]  # which cannot be reached: the read fails
        notices.discard(entry)
        if not notices:
            del self._notices[order.fetch]
        return True

    def _begin_read(self, each: _Reading, number: int, place: int) -> None:
        peer = self._peer(each.key[0])
        route, own = peer.routes[number], self.shards.ranks[self._rank]
        match each.order:
            case Read(theirs=theirs, mine=mine):
                sides = (peer.order.ranks[route.source], theirs), (own, mine)
            case Load(slots=slots, blocks=blocks):
                sides = (self._host.shard, slots), (own, blocks)
            case Store(blocks=blocks, slots=slots):
                sides = (own, blocks), (self._host.shard, slots)
        (source, _), (target, _) = sides
        layers = peer.slices[number][place]
        there, here = joined(*(pieces(self.shards, shard, route, layers, numbers) for shard, numbers in sides))
        if not len(here):
            return
        each.busy_since = each.busy_since or time.monotonic()
        try:
            reading = self._agent.read(peer.agents[route.source], there, here, source.device, target.device)
        except (ReadFailedError, KeyError):
            each.failed = True
            return
        each.num_bytes += reading.num_bytes
        each.under_way.append(reading)

    def _save(self, blocks: Sequence[FileBlock]) -> list[int]:
        assert self._host.file is not None
        try:
            for block in blocks:
                self._host.file.write(block, self._host.parts(block.group, block.slot))
        except OSError as error:
            log.warning("kv_file_not_written", rank=self._rank, error=error.strerror)
            return [block.place for block in blocks]
        return []

    def _fill(self, blocks: Sequence[FileBlock]) -> list[int]:
        assert self._host.file is not None
        bad = []
        for block in blocks:
            try:
                good = self._host.file.read(block, self._host.parts(block.group, block.slot))
            except OSError as error:
                log.warning("kv_file_not_read", rank=self._rank, error=error.strerror)
                good = False
            if not good:
                bad.append(block.place)
        return bad

    def _erase(self, places: Sequence[int]) -> None:
        assert self._host.file is not None
        try:
            for place in places:
                self._host.file.erase(place)
        except OSError as error:
            log.warning("kv_file_not_written", rank=self._rank, error=error.strerror)

    def _peer(self, number: int) -> _Peer:
        return self._self if number == SELF else self._peers[number]

"""The transfer workers of a rank and the connections between the ranks of two replicas: moves as events, not threads.

Simulates `kv_transfer/transfer_worker.py` and `peer_connection.py`. A move reads or writes one piece (one layer of one
route). Each pair moves independently, and a plan waits for none. Data arrives in order, delayed, sometimes damaged.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from headrace_worker.core.transfer.orders import (
    ClosePair,
    Drop,
    OpenPair,
    Order,
    PairFailed,
    Receive,
    Received,
    Send,
    TransferReport,
)
from headrace_worker.core.transfer.shards import Route
from support.simulation.shadow import INVALID, Cell, RankShadow
from support.simulation.world import Fifo, InvariantViolation, Owner, World

MAX_IN_FLIGHT = 2  # pieces between two ranks: a sender waits for its receiver
JOIN_SECONDS = 10.0
_WAIT, _PROGRESS = False, True


@dataclass(slots=True)
class Piece:
    """A layer's part of a chunk. Raw bytes have no type: a receiver can only check their number."""

    cells: list[list[Cell]]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.cells), len(self.cells[0])

    @property
    def checksum(self) -> int:
        return hash(tuple(tuple(cell) for cells in self.cells for cell in cells))


@dataclass(slots=True)
class Trailer:
    """Ends a chunk."""

    fetch: int
    chunk: int
    complete: bool
    checksum: int


@dataclass(slots=True)
class _Channel:
    """Data from one rank to another."""

    fifo: Fifo
    arrived: deque[Piece | Trailer] = field(default_factory=deque)
    in_flight: int = 0
    sender: Callable[[], None] = lambda: None
    receiver: Callable[[], None] = lambda: None


class DataFaults:
    """Faults that will still be injected into pieces in flight."""

    def __init__(self) -> None:
        self.corrupt = 0
        self.truncate = 0

    def apply(self, item: Piece | Trailer, world: World) -> Piece | Trailer | None:
        if isinstance(item, Piece) and self.truncate and world.chance(0.5):
            self.truncate -= 1
            return None
        if self.corrupt and world.chance(0.5):
            self.corrupt -= 1
            if isinstance(item, Trailer):
                return Trailer(item.fetch, item.chunk, item.complete, item.checksum ^ 1)
            cells = [[list(cell) for cell in row] for row in item.cells]
            world.random.choice(world.random.choice(cells))[0] = INVALID
            return Piece(cells)
        return item


class SimPairGroup:
    """The group of a pair: complete once all ranks of both sides have joined, broken for all when one leaves."""

    def __init__(self, world: World, size: int, data_faults: DataFaults) -> None:
        self.size = size
        self.broken = False
        self._world = world
        self._data_faults = data_faults
        self._members: dict[int, tuple[Owner, Callable[[], None], Callable[[], None]]] = {}
        self._channels: dict[tuple[int, int], _Channel] = {}
        self._held_until = 0.0

    @property
    def complete(self) -> bool:
        return len(self._members) == self.size and not self.broken

    def join(self, number: int, owner: Owner, wake: Callable[[], None], lose: Callable[[], None]) -> None:
        """`lose` is called when the group breaks, `wake` when data can be sent or received."""
        if self.broken:
            self._world.at(self._world.delay(), lose, owner)
            return
        self._members[number] = (owner, wake, lose)
        if self.complete:
            for _, call, _ in self._members.values():
                call()

    def hold(self, until: float) -> None:
        """Delays all data until then."""
        self._held_until = until
        for channel in self._channels.values():
            channel.fifo.held_until = until

    def disconnect(self) -> None:
        """Every rank detects it, each after its own delay."""
        if self.broken:
            return
        self.broken = True
        for owner, _, lose in self._members.values():
            self._world.at(self._world.delay(), lose, owner)

    def can_send(self, me: int, to: int) -> bool:
        return self._channel(me, to).in_flight < MAX_IN_FLIGHT

    def send(self, me: int, to: int, item: Piece | Trailer) -> None:
        channel = self._channel(me, to)
        damaged = self._data_faults.apply(item, self._world)
        if damaged is not None:
            channel.in_flight += 1
            channel.fifo.put(damaged)

    def receive(self, source: int, me: int) -> Piece | Trailer | None:
        channel = self._channel(source, me)
        if not channel.arrived:
            return None
        channel.in_flight -= 1
        self._wake(source)
        return channel.arrived.popleft()

    def _wake(self, number: int) -> None:
        if number in self._members:
            self._members[number][1]()

    def _channel(self, source: int, target: int) -> _Channel:
        channel = self._channels.get((source, target))
        if channel is None:

            def arrive(item: object) -> None:
                assert isinstance(item, Piece | Trailer)
                self._channels[source, target].arrived.append(item)
                self._wake(target)

            channel = self._channels[source, target] = _Channel(Fifo(self._world, None, arrive, self._held_until))
        return channel


class ConnectionLost(Exception):
    """The pair's connections are closed, or delivered unexpected data."""


@dataclass(slots=True, eq=False)
class LayerGate:
    """Opens when the step of a plan has written its keys and values on this rank."""

    opened: bool = False


@dataclass(slots=True, eq=False)
class _Item:
    order: Send | Receive
    gate: LayerGate | None
    left: int  # pieces to read or write

    @property
    def blocks(self) -> set[int]:
        return {block for row in self.order.blocks for block in row}


class SimPeerConnection:
    """One rank's end of a pair."""

    def __init__(self, worker: "SimTransferWorker", order: OpenPair, group: SimPairGroup) -> None:
        self.order = order
        self.live: dict[int, int] = {}
        self.items: deque[_Item] = deque()
        self._worker = worker
        self._shadow = worker.shadow
        self._group = group
        self._closed = False
        self._lost = False
        self._pumping = False
        rank = self._shadow.number
        mine = [route for route in order.routes if (route.source if order.sends else route.target) == rank]
        self._routes: list[Route] = sorted(mine, key=lambda route: route.target if order.sends else route.source)
        self._me = order.first + rank
        self._moves = self._run()

    def start(self) -> None:
        world = self._worker.world
        group, owner = self._group, self._worker.owner
        world.at(world.delay(), lambda: group.join(self._me, owner, self.wake, self._lose), owner)
        world.at(JOIN_SECONDS, lambda: None if group.complete or self._closed else group.disconnect(), owner)

    def put(self, order: Send | Receive, gate: LayerGate | None) -> None:
        if not isinstance(order, Receive) or order.blocks:
            self.live[order.fetch] = self.live.get(order.fetch, 0) + 1
        counts = order.counts if isinstance(order, Receive) else tuple(map(len, order.blocks))
        pieces = sum(len(layers) for route in self._routes for layers, n in zip(route.layers, counts, strict=True) if n)
        item = _Item(order, gate, pieces)
        self.items.append(item)
        if not pieces:
            self._worker.transferred(order)
        self.wake()

    def _count_piece(self, item: _Item) -> None:
        """A piece was read or written."""
        item.left -= 1
        if not item.left:
            self._worker.transferred(item.order)

    def drop(self, fetch: int) -> None:
        self.live.pop(fetch, None)

    def close(self) -> None:
        self.live.clear()
        self._closed = True
        self._group.disconnect()

    def blocks_in_transfer(self) -> set[int]:
        """Blocks that may still be read or written."""
        if self._lost:
            return set()
        return {
            block
            for item in self.items
            if item.left and item.order.fetch in self.live and (item.gate is None or item.gate.opened)
            for block in item.blocks
        }

    def wake(self) -> None:
        if not self._pumping and not self._closed and not self._lost:
            self._pumping = True
            world = self._worker.world
            world.at(world.delay(), self._pump, self._worker.owner)

    def move(self) -> bool:
        """Reads or writes one piece or trailer, if one is available."""
        if self._closed or self._lost or not self._group.complete:
            return _WAIT
        try:
            return next(self._moves)
        except ConnectionLost:
            self._group.disconnect()
            return _WAIT

    def _pump(self) -> None:
        self._pumping = False
        if self.move() is _PROGRESS:
            self.wake()

    def _lose(self) -> None:
        """The group broke: the remaining chunks have failed."""
        if self._closed or self._lost:
            return
        self._lost = True
        receives = [item.order for item in self.items if isinstance(item.order, Receive)]
        if receives:
            self._report(receives[0], good=False)
        self._worker.report(PairFailed(self._shadow.number, self.order.pair, "lost"))
        for order in receives[1:]:
            self._report(order, good=False)

    def _report(self, order: Receive, *, good: bool) -> None:
        self._worker.report(Received(self._shadow.number, order.pair, order.fetch, order.chunk, good, 1))

    def _run(self) -> Iterator[bool]:
        while True:
            while not self.items:
                yield _WAIT
            item = self.items[0]
            if isinstance(item.order, Send):
                yield from self._send(item, item.order)
            else:
                yield from self._receive(item, item.order)
            yield _PROGRESS

    def _send(self, item: _Item, order: Send) -> Iterator[bool]:
        gate = item.gate
        for route in self._routes:
            heads, peer = range(*route.heads), self.order.peers + route.target
            checksum, complete = 0, True
            for blocks, layers in zip(order.blocks, route.layers, strict=True):
                for layer in layers if blocks else ():
                    while (gate is not None and not gate.opened) or not self._group.can_send(self._me, peer):
                        yield _WAIT
                    complete = complete and order.fetch in self.live
                    piece = Piece(
                        self._shadow.read(layer, heads, blocks)
                        if complete
                        else [[[0] * self._shadow.block_size for _ in blocks] for _ in heads]
                    )
                    self._count_piece(item)
                    checksum = hash((checksum, piece.checksum))
                    self._group.send(self._me, peer, piece)
                    yield _PROGRESS
            self._group.send(self._me, peer, Trailer(order.fetch, order.chunk, complete, checksum))
            yield _PROGRESS
        self._finish_item(order)

    def _receive(self, item: _Item, order: Receive) -> Iterator[bool]:
        good = True
        for route in self._routes:
            heads, peer = range(*route.heads), self.order.peers + route.source
            checksum = 0
            for group, layers in enumerate(route.layers):
                for layer in layers if order.counts[group] else ():
                    while (found := self._group.receive(peer, self._me)) is None:
                        yield _WAIT
                    if not isinstance(found, Piece) or found.shape != (len(heads), order.counts[group]):
                        raise ConnectionLost
                    checksum = hash((checksum, found.checksum))
                    if order.fetch in self.live:
                        self._worker.written(order, group)
                        self._shadow.write(layer, heads, order.blocks[group], found.cells)
                    self._count_piece(item)
                    yield _PROGRESS
            while (trailer := self._group.receive(peer, self._me)) is None:
                yield _WAIT
            if not isinstance(trailer, Trailer) or (trailer.fetch, trailer.chunk) != (order.fetch, order.chunk):
                raise ConnectionLost
            good = good and trailer == Trailer(order.fetch, order.chunk, True, checksum)
            yield _PROGRESS
        self._finish_item(order)
        self._report(order, good=good)

    def _finish_item(self, order: Send | Receive) -> None:
        self.items.popleft()
        left = self.live.get(order.fetch, 1) - 1
        if left > 0:
            self.live[order.fetch] = left
        else:
            self.live.pop(order.fetch, None)


class SimTransferWorker:
    """The transfer worker of one rank."""

    def __init__(
        self,
        world: World,
        owner: Owner,
        shadow: RankShadow,
        group_of: Callable[[OpenPair], SimPairGroup],
        report: Callable[[TransferReport], None],
        transferred: Callable[[int, Send | Receive], None],
    ) -> None:
        self.world = world
        self.owner = owner
        self.shadow = shadow
        self.connections: dict[int, SimPeerConnection] = {}
        self.report = report
        self._group_of = group_of
        self._transferred = transferred
        self._dropped: set[tuple[int, int]] = set()

    def execute(self, order: Order, gate: LayerGate | None) -> None:
        match order:
            case OpenPair():
                if order.pair in self.connections:
                    raise InvariantViolation(f"pair {order.pair} is opened twice")
                connection = self.connections[order.pair] = SimPeerConnection(self, order, self._group_of(order))
                connection.start()
            case ClosePair(pair):
                closed = self.connections.pop(pair, None)
                if closed is not None:
                    closed.close()
            case Drop(pair, fetch):
                self._dropped.add((pair, fetch))
                if pair in self.connections:
                    self.connections[pair].drop(fetch)
            case Send() | Receive():
                if order.pair in self.connections:
                    self.connections[order.pair].put(order, gate)

    def opened(self) -> None:
        """A gate was opened."""
        for connection in self.connections.values():
            connection.wake()

    def move_some(self) -> None:
        """Transfer workers do not wait for the step thread: some move while it executes a plan."""
        for connection in list(self.connections.values()):
            for _ in range(self.world.random.randrange(3)):
                connection.move()

    def blocks_in_transfer(self) -> set[int]:
        """Blocks that the worker may still read or write, without those that a step must compute first."""
        return {
            block
            for connection in self.connections.values()
            if connection.live
            for block in connection.blocks_in_transfer()
        }

    def written(self, order: Receive, group: int) -> None:
        """Checks blocks before the worker writes them."""
        if (order.pair, order.fetch) in self._dropped:
            raise InvariantViolation(
                f"a transfer worker writes blocks {order.blocks[group]} of a fetch that was dropped"
            )

    def transferred(self, order: Send | Receive) -> None:
        self._transferred(self.shadow.number, order)

"""A rank's courier as `transfer/courier.py` and `carrier.py` are, move by move instead of on threads.

A move reads or writes one piece (one layer of one route). Each pair moves for itself, and a rank's plan waits for none.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from shadow import RankShadow
from wires import Label, PairWire, Piece
from world import BrokenPromise, Owner, World

from headrace_worker.transfer.orders import (
    ClosePair,
    Drop,
    OpenPair,
    Order,
    PairFailed,
    Receive,
    Received,
    Report,
    Send,
)
from headrace_worker.transfer.shards import Route

JOIN_SECONDS = 10.0
_WAIT, _MOVED = False, True


class WireLost(Exception):
    """The pair's connections are gone, or carry what was not expected."""


@dataclass(slots=True, eq=False)
class Gate:
    """Opens when the step of a plan has written its keys and values on this rank."""

    opened: bool = False


@dataclass(slots=True, eq=False)
class _Item:
    order: Send | Receive
    gate: Gate | None
    left: int  # pieces to read or write

    @property
    def blocks(self) -> set[int]:
        return {block for row in self.order.blocks for block in row}


class SimCarrier:
    """One rank's end of a pair."""

    def __init__(self, courier: "SimCourier", order: OpenPair, wire: PairWire) -> None:
        self.order = order
        self.live: dict[int, int] = {}
        self.items: deque[_Item] = deque()
        self._courier = courier
        self._shadow = courier.shadow
        self._wire = wire
        self._closed = False
        self._lost = False
        self._pumping = False
        rank = self._shadow.number
        mine = [route for route in order.routes if (route.source if order.sends else route.target) == rank]
        self._routes: list[Route] = sorted(mine, key=lambda route: route.target if order.sends else route.source)
        self._me = order.first + rank
        self._moves = self._run()

    def start(self) -> None:
        world = self._courier.world
        wire, owner = self._wire, self._courier.owner
        world.at(world.delay(), lambda: wire.join(self._me, owner, self.wake, self._lose), owner)
        world.at(JOIN_SECONDS, lambda: None if wire.whole or self._closed else wire.break_down(), owner)

    def put(self, order: Send | Receive, gate: Gate | None) -> None:
        if not isinstance(order, Receive) or order.blocks:
            self.live[order.fetch] = self.live.get(order.fetch, 0) + 1
        counts = order.counts if isinstance(order, Receive) else tuple(map(len, order.blocks))
        pieces = sum(len(layers) for route in self._routes for layers, n in zip(route.layers, counts, strict=True) if n)
        item = _Item(order, gate, pieces)
        self.items.append(item)
        if not pieces:
            self._courier.carried(order)
        self.wake()

    def _touch(self, item: _Item) -> None:
        """A piece was read or written."""
        item.left -= 1
        if not item.left:
            self._courier.carried(item.order)

    def drop(self, fetch: int) -> None:
        self.live.pop(fetch, None)

    def close(self) -> None:
        self.live.clear()
        self._closed = True
        self._wire.break_down()

    def touched(self) -> set[int]:
        """Blocks that may yet be read or written."""
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
            world = self._courier.world
            world.at(world.delay(), self._pump, self._courier.owner)

    def move(self) -> bool:
        """One piece or trailer, if there is one to be had."""
        if self._closed or self._lost or not self._wire.whole:
            return _WAIT
        try:
            return next(self._moves)
        except WireLost:
            self._wire.break_down()
            return _WAIT

    def _pump(self) -> None:
        self._pumping = False
        if self.move() is _MOVED:
            self.wake()

    def _lose(self) -> None:
        """The group broke: what is left is not good."""
        if self._closed or self._lost:
            return
        self._lost = True
        receives = [item.order for item in self.items if isinstance(item.order, Receive)]
        if receives:
            self._report(receives[0], good=False)
        self._courier.report(PairFailed(self._shadow.number, self.order.pair, "lost"))
        for order in receives[1:]:
            self._report(order, good=False)

    def _report(self, order: Receive, *, good: bool) -> None:
        self._courier.report(Received(self._shadow.number, order.pair, order.fetch, order.chunk, good, 1))

    def _run(self) -> Iterator[bool]:
        while True:
            while not self.items:
                yield _WAIT
            item = self.items[0]
            if isinstance(item.order, Send):
                yield from self._send(item, item.order)
            else:
                yield from self._receive(item, item.order)
            yield _MOVED

    def _send(self, item: _Item, order: Send) -> Iterator[bool]:
        gate = item.gate
        for route in self._routes:
            heads, peer = range(*route.heads), self.order.peers + route.target
            checksum, whole = 0, True
            for blocks, layers in zip(order.blocks, route.layers, strict=True):
                for layer in layers if blocks else ():
                    while (gate is not None and not gate.opened) or not self._wire.can_send(self._me, peer):
                        yield _WAIT
                    whole = whole and order.fetch in self.live
                    piece = Piece(
                        self._shadow.read(layer, heads, blocks)
                        if whole
                        else [[[0] * self._shadow.block_size for _ in blocks] for _ in heads]
                    )
                    self._touch(item)
                    checksum = hash((checksum, piece.checksum))
                    self._wire.send(self._me, peer, piece)
                    yield _MOVED
            self._wire.send(self._me, peer, Label(order.fetch, order.chunk, whole, checksum))
            yield _MOVED
        self._forget(order)

    def _receive(self, item: _Item, order: Receive) -> Iterator[bool]:
        good = True
        for route in self._routes:
            heads, peer = range(*route.heads), self.order.peers + route.source
            checksum = 0
            for group, layers in enumerate(route.layers):
                for layer in layers if order.counts[group] else ():
                    while (found := self._wire.receive(peer, self._me)) is None:
                        yield _WAIT
                    if not isinstance(found, Piece) or found.shape != (len(heads), order.counts[group]):
                        raise WireLost
                    checksum = hash((checksum, found.checksum))
                    if order.fetch in self.live:
                        self._courier.written(order, group)
                        self._shadow.write(layer, heads, order.blocks[group], found.cells)
                    self._touch(item)
                    yield _MOVED
            while (label := self._wire.receive(peer, self._me)) is None:
                yield _WAIT
            if not isinstance(label, Label) or (label.fetch, label.chunk) != (order.fetch, order.chunk):
                raise WireLost
            good = good and label == Label(order.fetch, order.chunk, True, checksum)
            yield _MOVED
        self._forget(order)
        self._report(order, good=good)

    def _forget(self, order: Send | Receive) -> None:
        self.items.popleft()
        left = self.live.get(order.fetch, 1) - 1
        if left > 0:
            self.live[order.fetch] = left
        else:
            self.live.pop(order.fetch, None)


class SimCourier:
    """Of one rank."""

    def __init__(
        self,
        world: World,
        owner: Owner,
        shadow: RankShadow,
        wire_of: Callable[[OpenPair], PairWire],
        report: Callable[[Report], None],
        carried: Callable[[int, Send | Receive], None],
    ) -> None:
        self.world = world
        self.owner = owner
        self.shadow = shadow
        self.carriers: dict[int, SimCarrier] = {}
        self.report = report
        self._wire_of = wire_of
        self._carried = carried
        self._dropped: set[tuple[int, int]] = set()

    def take(self, order: Order, gate: Gate | None) -> None:
        match order:
            case OpenPair():
                if order.pair in self.carriers:
                    raise BrokenPromise(f"pair {order.pair} is opened twice")
                carrier = self.carriers[order.pair] = SimCarrier(self, order, self._wire_of(order))
                carrier.start()
            case ClosePair(pair):
                gone = self.carriers.pop(pair, None)
                if gone is not None:
                    gone.close()
            case Drop(pair, fetch):
                self._dropped.add((pair, fetch))
                if pair in self.carriers:
                    self.carriers[pair].drop(fetch)
            case Send() | Receive():
                if order.pair in self.carriers:
                    self.carriers[order.pair].put(order, gate)

    def opened(self) -> None:
        """A gate is."""
        for carrier in self.carriers.values():
            carrier.wake()

    def hurry(self) -> None:
        """Couriers do not wait for the step thread: some move while it takes a plan."""
        for carrier in list(self.carriers.values()):
            for _ in range(self.world.random.randrange(3)):
                carrier.move()

    def touched(self) -> set[int]:
        """Blocks that couriers may yet read or write, besides those that a step must compute first."""
        return {block for carrier in self.carriers.values() if carrier.live for block in carrier.touched()}

    def written(self, order: Receive, group: int) -> None:
        """A courier is about to write."""
        if (order.pair, order.fetch) in self._dropped:
            raise BrokenPromise(f"a courier writes blocks {order.blocks[group]} of a fetch that was dropped")

    def carried(self, order: Send | Receive) -> None:
        self._carried(self.shadow.number, order)

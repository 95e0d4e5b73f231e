"""The connections between the ranks of two replicas: data arrives in order, delayed, sometimes damaged."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from support.simulation.shadow import INVALID, Cell
from support.simulation.world import Fifo, Owner, World

MAX_IN_FLIGHT = 2  # pieces between two ranks: a sender waits for its receiver


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

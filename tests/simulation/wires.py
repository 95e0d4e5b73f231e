"""The bytes' way between the ranks of two replicas: in order, unhurried, sometimes damaged."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from shadow import SPOILT, Cell
from world import Fifo, Owner, World

MOST_UNDERWAY = 2  # pieces between two ranks: a sender waits for its receiver


@dataclass(slots=True)
class Piece:
    """A layer's part of a chunk. Bytes do not say what they are: only their number can be seen."""

    cells: list[list[Cell]]

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.cells), len(self.cells[0])

    @property
    def checksum(self) -> int:
        return hash(tuple(tuple(cell) for cells in self.cells for cell in cells))


@dataclass(slots=True)
class Label:
    """A trailer."""

    fetch: int
    chunk: int
    whole: bool
    checksum: int


@dataclass(slots=True)
class _Lane:
    """From one rank to another."""

    fifo: Fifo
    arrived: deque[Piece | Label] = field(default_factory=deque)
    underway: int = 0
    sender: Callable[[], None] = lambda: None
    receiver: Callable[[], None] = lambda: None


class Damage:
    """What is still to go wrong with pieces under way."""

    def __init__(self) -> None:
        self.corrupt = 0
        self.truncate = 0

    def apply(self, item: Piece | Label, world: World) -> Piece | Label | None:
        if isinstance(item, Piece) and self.truncate and world.chance(0.5):
            self.truncate -= 1
            return None
        if self.corrupt and world.chance(0.5):
            self.corrupt -= 1
            if isinstance(item, Label):
                return Label(item.fetch, item.chunk, item.whole, item.checksum ^ 1)
            cells = [[list(cell) for cell in row] for row in item.cells]
            world.random.choice(world.random.choice(cells))[0] = SPOILT
            return Piece(cells)
        return item


class PairWire:
    """A pair's group: whole once all ranks of both sides have come, broken for all when one leaves."""

    def __init__(self, world: World, size: int, damage: Damage) -> None:
        self.size = size
        self.broken = False
        self._world = world
        self._damage = damage
        self._members: dict[int, tuple[Owner, Callable[[], None], Callable[[], None]]] = {}
        self._lanes: dict[tuple[int, int], _Lane] = {}
        self._held_until = 0.0

    @property
    def whole(self) -> bool:
        return len(self._members) == self.size and not self.broken

    def join(self, number: int, owner: Owner, wake: Callable[[], None], lose: Callable[[], None]) -> None:
        """`lose` is called when the group breaks, `wake` when there is something to do."""
        if self.broken:
            self._world.at(self._world.delay(), lose, owner)
            return
        self._members[number] = (owner, wake, lose)
        if self.whole:
            for _, call, _ in self._members.values():
                call()

    def hold(self, until: float) -> None:
        """Nothing gets through until then."""
        self._held_until = until
        for lane in self._lanes.values():
            lane.fifo.held_until = until

    def break_down(self) -> None:
        """Everybody notices, each in its own time."""
        if self.broken:
            return
        self.broken = True
        for owner, _, lose in self._members.values():
            self._world.at(self._world.delay(), lose, owner)

    def can_send(self, me: int, to: int) -> bool:
        return self._lane(me, to).underway < MOST_UNDERWAY

    def send(self, me: int, to: int, item: Piece | Label) -> None:
        lane = self._lane(me, to)
        damaged = self._damage.apply(item, self._world)
        if damaged is not None:
            lane.underway += 1
            lane.fifo.put(damaged)

    def receive(self, source: int, me: int) -> Piece | Label | None:
        lane = self._lane(source, me)
        if not lane.arrived:
            return None
        lane.underway -= 1
        self._wake(source)
        return lane.arrived.popleft()

    def _wake(self, number: int) -> None:
        if number in self._members:
            self._members[number][1]()

    def _lane(self, source: int, target: int) -> _Lane:
        lane = self._lanes.get((source, target))
        if lane is None:

            def arrive(item: object) -> None:
                assert isinstance(item, Piece | Label)
                self._lanes[source, target].arrived.append(item)
                self._wake(target)

            lane = self._lanes[source, target] = _Lane(Fifo(self._world, None, arrive, self._held_until))
        return lane

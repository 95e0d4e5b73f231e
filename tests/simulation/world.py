"""Time, chance and the order of events: one seeded loop for a whole cluster."""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from random import Random
from typing import Protocol

MOST_EVENTS = 60_000


class BrokenPromise(AssertionError):
    """An invariant does not hold."""


class Owner(Protocol):
    """Whose events are lost when it dies, and wait while it stands still."""

    alive: bool
    frozen_until: float


@dataclass(slots=True)
class Fifo:
    """Brings things in order, each after a delay of its own."""

    world: "World"
    owner: Owner | None  # who receives
    deliver: Callable[[object], None]
    held_until: float = 0.0
    _last: float = 0.0

    def put(self, item: object) -> None:
        """Takes a moment."""
        due = max(self._last, self.world.now + self.world.delay(), self.held_until)
        self._last = due
        self.world.at(due - self.world.now, lambda: self.deliver(item), self.owner)


class World:
    """Virtual seconds. Whatever happens is an event, and the seed alone says when."""

    def __init__(self, seed: int, *, tracing: bool = False) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.now = 0.0
        self.events = 0
        self.tracing = tracing
        self._heap: list[tuple[float, int, Owner | None, Callable[[], None]]] = []
        self._count = 0

    def clock(self) -> float:
        return self.now

    def delay(self) -> float:
        """Of a message: mostly below 10 ms, now and then long."""
        random = self.random.random
        return 0.3 * random() if random() < 0.02 else 0.008 * random() ** 2

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def at(self, delay: float, action: Callable[[], None], owner: Owner | None = None) -> None:
        """An event `delay` from now: lost when its owner is dead then, late when it stands still."""
        self._count += 1
        heappush(self._heap, (self.now + delay, self._count, owner, action))

    def log(self, sentence: str) -> None:
        """Callers ask `tracing` first, as most runs are not traced."""
        print(f"{self.now:9.4f}  {sentence}")

    def run(self) -> None:
        """Until nothing is left to happen. Raises BrokenPromise when it never ends."""
        heap = self._heap
        while heap:
            due, number, owner, action = heappop(heap)
            if owner is not None:
                if not owner.alive:
                    continue
                if owner.frozen_until > due:
                    heappush(heap, (owner.frozen_until, number, owner, action))
                    continue
            self.now = due
            self.events += 1
            if self.events > MOST_EVENTS:
                raise BrokenPromise(f"the cluster does not come to rest within {MOST_EVENTS} events")
            action()

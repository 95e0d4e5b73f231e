"""Virtual time, random numbers, the order of events, and which processes reach each other."""

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import NoReturn, Protocol

from headrace_base.cluster_member import PING_SECONDS

MAX_EVENTS = 60_000


class InvariantViolation(AssertionError):
    """An invariant does not hold."""


class Owner(Protocol):
    """A simulated process: its events are lost when it is killed, and delayed while it is frozen."""

    alive: bool
    frozen_until: float


@dataclass(slots=True)
class Fifo:
    """Delivers items in order, each after a random delay."""

    world: "World"
    owner: Owner | None  # the receiver
    deliver: Callable[[object], None]
    held_until: float = 0.0
    _last: float = 0.0

    def put(self, item: object) -> None:
        """Sends an item; it is delivered after a delay."""
        due = max(self._last, self.world.now + self.world.delay(), self.held_until)
        self._last = due
        self.world.at(due - self.world.now, lambda: self.deliver(item), self.owner)


class World:
    """The event loop, in virtual seconds. Everything is an event, and only the seed determines its time."""

    def __init__(self, seed: int, *, tracing: bool = False, max_events: int = MAX_EVENTS) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.now = 0.0
        self.events = 0
        self.tracing = tracing
        self.violation: InvariantViolation | None = None
        self._max_events = max_events
        self._heap: list[tuple[float, int, Owner | None, Callable[[], None]]] = []
        self._count = 0

    def clock(self) -> float:
        return self.now

    def delay(self) -> float:
        """Delay of a message: mostly below 10 ms, occasionally long."""
        random = self.random.random
        return 0.3 * random() if random() < 0.02 else 0.008 * random() ** 2

    def chance(self, probability: float) -> bool:
        return self.random.random() < probability

    def at(self, delay: float, action: Callable[[], None], owner: Owner | None = None) -> None:
        """Schedules an event `delay` from now: lost if its owner is dead then, delayed while it is frozen."""
        self._count += 1
        heappush(self._heap, (self.now + delay, self._count, owner, action))

    def log(self, sentence: str, *values: object) -> None:
        """Prints it with its values if the run is traced; most are not, and do not format it."""
        if self.tracing:
            print(f"{self.now:9.4f}  {sentence.format(*values) if values else sentence}")

    def fail(self, sentence: str) -> NoReturn:
        """An invariant does not hold. `run` raises it, too: code under test may have caught this exception."""
        self.violation = self.violation or InvariantViolation(sentence)
        raise self.violation

    def run(self, until: float = inf, done: Callable[[], bool] = lambda: False) -> None:
        """Runs until no event is left, until a time, or until `done`; an event may call it, as a call that blocks.

        Raises InvariantViolation, also when there are too many events.
        """
        heap = self._heap
        while heap and heap[0][0] <= until and not done():
            due, number, owner, action = heappop(heap)
            if owner is not None:
                if not owner.alive:
                    continue
                if owner.frozen_until > due:
                    heappush(heap, (owner.frozen_until, number, owner, action))
                    continue
            self.now = due
            self.events += 1
            if self.events > self._max_events:
                raise InvariantViolation(f"the cluster does not become idle within {self._max_events} events")
            action()
            if self.violation is not None:
                raise self.violation
        if until < inf and not done():
            self.now = max(self.now, until)


class Network:
    """Processes are named. A cut direction delivers later what was sent meanwhile, as TCP does."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._cuts: dict[tuple[str, str], float] = {}

    def cut(self, sender: str, receiver: str, until: float) -> None:
        """Nothing that the sender sends arrives before then."""
        self._cuts[sender, receiver] = max(until, self.open_at(sender, receiver))

    def cut_both(self, one: str, other: str, until: float) -> None:
        self.cut(one, other, until)
        self.cut(other, one, until)

    def open_at(self, sender: str, receiver: str) -> float:
        """Time from which on messages arrive; in the past: they do."""
        return self._cuts.get((sender, receiver), 0.0)

    def connected(self, one: str, other: str) -> bool:
        """Whether a new connection can be opened: both directions work."""
        return max(self.open_at(one, other), self.open_at(other, one)) <= self._world.now


class Keepalive:
    """Of one end of a connection: whether the other end has not answered for too long."""

    def __init__(self, network: Network, world: World, server: str, client: str, reply_seconds: int) -> None:
        self._network = network
        self._world = world
        self._ends = server, client
        self._seconds = PING_SECONDS + reply_seconds
        self._cut_since: float | None = None

    def expired(self) -> bool:
        """To be called repeatedly."""
        if self._network.connected(*self._ends):
            self._cut_since = None
            return False
        self._cut_since = self._world.now if self._cut_since is None else self._cut_since
        return self._world.now - self._cut_since > self._seconds

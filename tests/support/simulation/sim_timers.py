"""Timers of one simulated router."""

from collections.abc import Callable
from typing import Protocol

from support.simulation.world import Owner, World


class TimerOwner(Owner, Protocol):
    """A process with a clock of its own."""

    world: World
    rate: float  # seconds of its clock per second

    def clock(self) -> float: ...


class SimTimer:
    """One scheduled call that may be cancelled."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self._call = None

    def fire(self) -> None:
        if self._call is not None:
            self._call()


class SimTimers:
    """On the clock of their owner; lost when it is killed."""

    def __init__(self, owner: TimerOwner) -> None:
        self._owner = owner

    def now(self) -> float:
        return self._owner.clock()

    def soon(self, call: Callable[[], None]) -> Callable[[], None]:
        return self.after(0.0, call)

    def after(self, seconds: float, call: Callable[[], None]) -> Callable[[], None]:
        timer = SimTimer(call)
        self._owner.world.at(seconds / self._owner.rate, timer.fire, self._owner)
        return timer.cancel

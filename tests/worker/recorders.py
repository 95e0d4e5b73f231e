"""Recorders that need no GPU: a replay calls the step again on the same buffers, which is what a graph does."""

import time
from collections.abc import Callable, Mapping
from typing import Any


class CallingRecorder:
    """Counts the replays of each recorded step, in the order in which they were recorded."""

    def __init__(self) -> None:
        self.replays: list[int] = []

    def rehearse(self, step: Callable[[], None]) -> None:
        step()

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        place = len(self.replays)
        self.replays.append(0)

        def replay() -> None:
            self.replays[place] += 1
            step()

        return replay


class FaultyRecorder(CallingRecorder):
    """One of its rehearsals or recordings raises, or never ends."""

    def __init__(self, at: str, number: int, hangs: bool = False, tell: Callable[[], None] = lambda: None) -> None:
        """`at`: "rehearse" or "record"; `number`: of the call that goes wrong, from 1; `tell`: called just before."""
        super().__init__()
        self._at, self._number, self._hangs, self._tell = at, number, hangs, tell
        self._calls = {"rehearse": 0, "record": 0}

    def rehearse(self, step: Callable[[], None]) -> None:
        self._go_wrong("rehearse")
        super().rehearse(step)

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        self._go_wrong("record")
        return super().record(step)

    def _go_wrong(self, at: str) -> None:
        self._calls[at] += 1
        if (at, self._calls[at]) == (self._at, self._number):
            self._tell()
            if self._hangs:
                time.sleep(1000)
            raise ArithmeticError("a secret detail")


def make_recorder(fault: Mapping[str, Any], tell: Callable[[], None] = lambda: None) -> CallingRecorder:
    """A faulty one if `fault` has its options."""
    return FaultyRecorder(**fault, tell=tell) if fault else CallingRecorder()

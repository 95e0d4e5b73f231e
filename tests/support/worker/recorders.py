"""Recorders that need no GPU: a replay calls the step again on the same buffers, as a graph does."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import Tensor

T = TypeVar("T")


class CallingRecorder:
    """Counts the replays of each recorded step, in the order of recording."""

    def __init__(self) -> None:
        self.replays: list[int] = []
        self.warmed: list[Tensor] = []  # outputs of the newest run of `warm_up`, which is of the step that is recorded

    def allocate(self, make: Callable[[], T]) -> T:
        return make()

    def warm_up(self, step: Callable[[], Any]) -> None:
        self.warmed = list(step() or ())

    def record(self, step: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        place = len(self.replays)
        self.replays.append(0)
        outputs = [output.clone() for output in self.warmed]

        def replay() -> None:
            self.replays[place] += 1
            for output, made in zip(outputs, step(), strict=True):
                output.copy_(made)

        return replay, outputs

    def seconds(self, replay: Callable[[], None]) -> float:
        return 1.0


class FaultyRecorder(CallingRecorder):
    """One of its warm-up runs or recordings raises, or never ends."""

    def __init__(self, at: str, number: int, hangs: bool = False, notify: Callable[[], None] = lambda: None) -> None:
        """`at`: "allocate", "warm_up" or "record"; `number`: of the call that fails, from 1.

        `notify`: called just before.
        """
        super().__init__()
        self._at, self._number, self._hangs, self._notify = at, number, hangs, notify
        self._calls = {"allocate": 0, "warm_up": 0, "record": 0}

    def allocate(self, make: Callable[[], T]) -> T:
        self._fail_if_due("allocate")
        return super().allocate(make)

    def warm_up(self, step: Callable[[], Any]) -> None:
        self._fail_if_due("warm_up")
        super().warm_up(step)

    def record(self, step: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        self._fail_if_due("record")
        return super().record(step)

    def _fail_if_due(self, at: str) -> None:
        self._calls[at] += 1
        if (at, self._calls[at]) == (self._at, self._number):
            self._notify()
            if self._hangs:
                time.sleep(1000)
            raise ArithmeticError("a secret detail")


def make_recorder(fault: Mapping[str, Any], notify: Callable[[], None] = lambda: None) -> CallingRecorder:
    """A faulty recorder if `fault` has its options."""
    return FaultyRecorder(**fault, notify=notify) if fault else CallingRecorder()

"""Ends a replica whose step does not end: a collective that waits for ever, or a GPU that does not answer.

The processes of all ranks are alive and send heartbeats then, so that the failure detector finds nothing.
"""

import threading
from collections.abc import Callable

TICK_SECONDS = 0.1
LEAST_TICKS = 80  # that a step may take, however short it is predicted to be
FACTOR = 8.0  # times the prediction: routers move the streams away long before (`headrace_proto/stall.py`)


class StepWatch:
    """Counts ticks, on a thread of its own, while a step runs. `on_hang` is called once, with a sentence.

    Ticks, not wall time: those in which this process, or the whole machine, is paused do not count.
    """

    def __init__(self, predicted: Callable[[], float], on_hang: Callable[[str], None]) -> None:
        """predicted: seconds of the longest step that runs or is waited for; called on the thread of the watch."""
        self._predicted = predicted
        self._on_hang = on_hang
        self._running = False
        self._ticks = 0  # ticks since the running step began
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="headrace-step-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def begin(self) -> None:
        """A step begins, on the thread that runs all of them."""
        self._ticks = 0
        self._running = True

    def end(self) -> None:
        """It has ended."""
        self._running = False

    def stop(self) -> None:
        """Ends the watch; idempotent."""
        self._ended.set()

    def tick(self) -> str:
        """Counts a tick. Returns why the step counts as hanging; empty if it does not."""
        if not self._running:
            return ""
        self._ticks += 1
        predicted = self._predicted()
        if self._ticks <= max(LEAST_TICKS, FACTOR * predicted / TICK_SECONDS):
            return ""
        return (
            f"a step hangs: it has not ended for {self._ticks * TICK_SECONDS:.1f} s, and {predicted:.2f} s were "
            "predicted; a rank waits for another one, or a GPU does not answer"
        )

    def _run(self) -> None:
        while not self._ended.wait(TICK_SECONDS):
            if why := self.tick():
                self._on_hang(why)
                return

"""Ctrl-C and SIGTERM: the first asks for an orderly stop, one more ends everything at once."""

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_SAME_SECONDS = 0.5  # a terminal and a parent may both pass on one Ctrl-C


class StopSignals:
    """Of the main thread. While `interrupting`, the first signal raises KeyboardInterrupt where the program is."""

    def __init__(self, force: Callable[[], None]) -> None:
        self.requested = threading.Event()
        self.interrupting = True
        self._force = force
        self._first = 0.0

    def install(self) -> None:
        """Takes the signals over."""
        for number in _SIGNALS:
            signal.signal(number, self._handle)

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """What is inside is not interrupted by the first signal; KeyboardInterrupt comes at its end."""
        self.interrupting = False
        yield
        self.interrupting = True
        if self.requested.is_set():
            raise KeyboardInterrupt

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if self.requested.is_set():
            if time.monotonic() - self._first > _SAME_SECONDS:
                self._force()
            return
        self._first = time.monotonic()
        self.requested.set()
        if self.interrupting:
            raise KeyboardInterrupt

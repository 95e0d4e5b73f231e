"""Ctrl-C, SIGTERM and a closed terminal: the first signal requests a stop, a second one ends all processes at once.

A separate thread reads them, since the main thread may be in a call of Ray that no signal interrupts.
"""

import os
import select
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType

STOP_ALL = signal.SIGUSR1  # from `headrace stop`: ends the cluster, too, where the others end the controller alone
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_SECONDS = 0.5  # a terminal and a parent process may both forward one Ctrl-C


class StopSignals:
    """For the main thread. Until `enter_stop`, the first signal raises KeyboardInterrupt in it.

    force: ends the process, whatever the main thread does; called by the reading thread after a second signal, or at
    the deadline.
    """

    def __init__(self, force: Callable[[], None], start_limit: float | None = None) -> None:
        """start_limit: seconds from the first signal until `force` before `enter_serving`; none: no limit."""
        self.requested = threading.Event()
        self.number = 0  # of the last signal; 0: none was received
        self.repeated = False
        self.serving = False  # a stop takes as long as requests in flight do
        self._interrupting = True
        self._start_limit = start_limit
        self._force = force
        self._deadline: float | None = None
        self._reader, self._writer = os.pipe()

    def install(self) -> None:
        """Installs the handlers. SIGHUP stays ignored if the caller ignores it (nohup)."""
        for descriptor in (self._reader, self._writer):
            os.set_blocking(descriptor, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._interrupt)
        threading.Thread(target=self._read, name="stop-signals", daemon=True).start()

    def enter_serving(self) -> None:
        """Clients may have requests in flight from now on. Idempotent."""
        self.serving = True

    def enter_stop(self) -> None:
        """A stop begins: signals do not interrupt the main thread any more."""
        self._interrupting = False

    def force_within(self, seconds: float) -> None:
        """Calls `force` if the process has not ended by itself within `seconds`."""
        self._deadline = time.monotonic() + seconds
        os.write(self._writer, b"\0")  # the reading thread reads the new deadline

    @property
    def status(self) -> int:
        """The exit status after a signal, as shells define it: 128 + its number."""
        return 128 + self.number

    def _interrupt(self, number: int, _frame: FrameType | None) -> None:
        """In the main thread. Uses no lock: it may run between any two instructions."""
        self.number = number
        if self._interrupting:
            self._interrupting = False
            raise KeyboardInterrupt

    def _read(self) -> None:
        first = 0.0
        while True:
            left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
            if not select.select([self._reader], [], [], left)[0]:
                self._force()
                return
            for number in os.read(self._reader, 64):
                if number not in _SIGNALS:
                    continue
                self.number = number
                if not self.requested.is_set():
                    first = time.monotonic()
                    self.requested.set()
                    if self._start_limit is not None and not self.serving:
                        self._deadline = first + self._start_limit
                elif time.monotonic() - first > SAME_SECONDS:
                    self.repeated = True
                    self._force()
                    return

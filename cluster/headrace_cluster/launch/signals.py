"""Ctrl-C, SIGTERM and a closed terminal: while clients are served, the first signal requests a stop in order.

A signal before that, or a second one, ends all processes at once. A separate thread reads them, since the main thread
may be in a call of Ray that no signal interrupts.
"""

import os
import signal
import threading
import time
from collections.abc import Callable

STOP_ALL = signal.SIGUSR1  # from `headrace stop`: ends the cluster, too, where the others end the controller alone
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAME_SECONDS = 0.5  # a terminal and a parent process may both forward one Ctrl-C


class StopSignals:
    """Create it in the main thread, and then call `install`."""

    def __init__(self, force: Callable[[int], None]) -> None:
        """force: ends the process, whatever the main thread does; called with the signal, in the reading thread."""
        self.requested = threading.Event()
        self.serving = False  # clients may have requests in flight
        self._force = force
        self._reader, self._writer = os.pipe()

    def install(self) -> None:
        """Installs the handlers. SIGHUP stays ignored if the caller ignores it (nohup)."""
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in _SIGNALS:
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, lambda _number, _frame: None)  # the number is written to the pipe
        threading.Thread(target=self._read, name="stop-signals", daemon=True).start()

    def _read(self) -> None:
        first = 0.0
        while True:
            (number,) = os.read(self._reader, 1)
            if number not in _SIGNALS:
                continue
            if self.serving and not self.requested.is_set():
                first = time.monotonic()
                self.requested.set()
            elif time.monotonic() - first > SAME_SECONDS:
                self._force(number)

"""The controller's monitor in a thread of its own: its calls of Ray wait for as long as Ray's GCS does not answer."""

import threading
from collections import deque

from headrace_cluster.core.view import View
from headrace_cluster.launch.controller_monitor import ControllerMonitor, MonitoredController

WATCH_SECONDS = 0.5  # between two polls
JOIN_SECONDS = 2.0  # at a stop, for a call of Ray to return


class ControllerWatch:
    """Polls from the start on. The other threads never wait for it: routers, secrets and stops do without Ray."""

    def __init__(self, controller: MonitoredController, poll_seconds: float = WATCH_SECONDS) -> None:
        self._messages: deque[str] = deque()
        self._monitor = ControllerMonitor(controller, self._messages.append)
        self._poll_seconds = poll_seconds
        self._views: deque[View] = deque(maxlen=1)
        self._error: Exception | None = None
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="controller", daemon=True)
        self._thread.start()

    def poll(self) -> View | None:
        """The newest view, once; None without a newer one. Never waits. Raises ControllerTakenError."""
        if self._error is not None:
            raise self._error
        return self._views.pop() if self._views else None

    def messages(self) -> list[str]:
        """What happened since the last call."""
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def end(self) -> None:
        """A stop begins: no other poll or restart does."""
        self._ending.set()

    def stop(self, seconds: float) -> bool:
        """Whether the thread has ended: it waits in a call of Ray otherwise, and this process must not wait for it."""
        self.end()
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                view = self._monitor.poll()
            except Exception as error:
                self._error = error
                return
            if view is not None:
                self._views.append(view)
            self._ending.wait(self._poll_seconds)

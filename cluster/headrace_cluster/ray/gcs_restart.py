"""When another GCS starts for our own Ray after one has ended. Replicas serve meanwhile; its state is on disk."""

import random
import time
from collections.abc import Callable

import structlog

from headrace_cluster.core.backoff import Backoff

BACKOFF = Backoff(1.0, 30.0)  # between attempts; before the first attempt there is no pause
STABLE_SECONDS = 60.0  # one that ran so long starts the pauses from the beginning

log = structlog.get_logger(__name__)


class GcsRestart:
    """For the thread that started Ray: its processes end with that thread."""

    def __init__(
        self,
        is_dead: Callable[[], bool],
        start: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[], float] = random.random,
    ) -> None:
        """start: of another one; may raise."""
        self._is_dead = is_dead
        self._start = start
        self._clock = clock
        self._random = random
        self._failures = 0
        self._next = clock()

    def poll(self) -> str:
        """What was done, for the operator; empty: nothing."""
        now = self._clock()
        if now < self._next or not self._is_dead():
            return ""
        self._failures = 1 if now - self._next > STABLE_SECONDS else self._failures + 1
        self._next = now + BACKOFF.seconds(self._failures, self._random)
        try:
            self._start()
        except Exception as error:
            log.error("the next GCS of Ray could not be started", exc_info=error)
            return f"Ray's gcs_server ended, and the next one did not start ({type(error).__name__}); trying again"
        return "Ray's gcs_server ended; another one was started, and requests were served meanwhile"

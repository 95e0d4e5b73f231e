"""How long the pieces of one chunk take to send."""

import contextlib
import time
from collections.abc import Callable, Iterator


class SendClock:
    """Without waits for layers, and without the wait of the first piece for the target, whose step comes first."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began = clock()
        self._paused = 0.0  # seconds
        self._first: tuple[float, int] | None = None  # seconds and bytes of the first piece
        self._bytes = 0

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Its time does not count."""
        before = self._clock()
        yield
        self._paused += self._clock() - before

    def sent(self, num_bytes: int) -> None:
        """A piece was sent."""
        self._bytes += num_bytes
        if self._first is None:
            self._first = self._elapsed, num_bytes

    @property
    def seconds(self) -> float:
        """Of all pieces, as fast as those after the first one; of a single one, its own."""
        if self._first is None:
            return 0.0
        seconds, num_bytes = self._first
        rest = self._bytes - num_bytes
        return (self._elapsed - seconds) * self._bytes / rest if rest else seconds

    @property
    def _elapsed(self) -> float:
        return self._clock() - self._began - self._paused

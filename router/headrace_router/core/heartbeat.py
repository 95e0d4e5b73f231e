"""Whether a replica's step loop moves: its step counter, as its stream brings it. Pure; the clock is passed in."""

from collections.abc import Callable


class Heartbeat:
    """Of one replica, over all of its streams."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.step = -1  # the newest
        self.moves = 0  # of the step counter, seen on one stream
        self._clock = clock
        self._boot_id: bytes | None = None  # of the process at the other end of the last stream
        self.at = 0.0  # when the counter moved
        self._opened = 0.0  # when the stream was opened

    @property
    def seconds(self) -> float:
        """Since the step counter moved."""
        return self._clock() - self.at

    @property
    def silent_seconds(self) -> float:
        """Since it moved, or the stream was opened."""
        return self._clock() - max(self.at, self._opened)

    def opened(self, boot_id: bytes, step: int, *, stalled: bool) -> None:
        """A stream was opened, to this process.

        A process whose step loop hangs may still connect: it counts as stalled until it makes a step.
        """
        if boot_id != self._boot_id or not stalled:
            self.at = self._clock()
        self._boot_id, self.step, self._opened = boot_id, step, self._clock()

    def stepped(self, step: int) -> bool:
        """The stream brought this number. Returns whether the counter moved."""
        if step <= self.step:
            return False
        self.moves += self.step > 0  # the first one after a hello may be of an earlier time
        self.step, self.at = step, self._clock()
        return True

    def extend(self, seconds: float) -> None:
        """This process was paused: the replica's frames of that time are not read yet."""
        now = self._clock()
        self.at, self._opened = min(now, self.at + seconds), min(now, self._opened + seconds)

"""A replica that one choice uses alone: reserved while it waits, isolated while it runs."""

from collections.abc import Callable

from headrace_proto.trial import RESERVED_SECONDS


class Reservation:
    """Of one replica, by this router. A reservation ends by itself: its owner renews it while it waits."""

    def __init__(self, clock: Callable[[], float], on_change: Callable[[], None]) -> None:
        self.until = 0.0
        self.attempt_id = b""  # that runs alone: nothing else is placed there until it ends
        self._clock = clock
        self._on_change = on_change

    @property
    def active(self) -> bool:
        """Whether a choice of this router waits to run there alone."""
        return self._clock() < self.until

    def renew(self) -> None:
        """For longer than the pause between two searches."""
        self.until = self._clock() + RESERVED_SECONDS
        self._on_change()

    def begin(self, attempt_id: bytes) -> None:
        """The attempt runs there alone from now on."""
        self.attempt_id, self.until = attempt_id, 0.0
        self._on_change()

    def end(self, attempt_id: bytes) -> None:
        """It need not run alone any more. Others are ignored."""
        if self.attempt_id == attempt_id:
            self.attempt_id = b""
            self._on_change()

"""Bounds the streams that one caller has open on an internal server."""

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import structlog

# Of one method. A caller needs one; a connection that was lost may have others until that is detected. A further stream
# is refused and replaces none: what gRPC holds for a stream that is not read, it holds until its connection ends, and
# another process with the same credentials could end the stream that serves.
STREAMS_PER_CALLER = 8
SHOWN_SECONDS = 60.0  # that a refusal is shown, and until it is logged again
SHOWN_CALLERS = 8

log = structlog.get_logger(__name__)


class CallerStreams:
    """The open streams of each caller and method. Of one server."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds."""
        self._open: Counter[tuple[str, str]] = Counter()
        self._clock = clock
        self._refused: dict[str, float] = {}  # callers, with the time of the last refusal
        self._logged: dict[str, float] = {}

    @property
    def refused(self) -> list[str]:
        """Callers of which a stream was refused within the last minute, the last eight."""
        now = self._clock()
        self._refused = {caller: at for caller, at in self._refused.items() if now - at < SHOWN_SECONDS}
        return sorted(sorted(self._refused, key=self._refused.__getitem__)[-SHOWN_CALLERS:])

    @contextmanager
    def count(self, method: str, caller: str) -> Iterator[bool]:
        """While the caller's stream is open, if it may be."""
        key = method, caller
        if self._open[key] >= STREAMS_PER_CALLER:
            self._note_refusal(method, caller)
            yield False
            return
        self._open[key] += 1
        try:
            yield True
        finally:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]

    def _note_refusal(self, method: str, caller: str) -> None:
        now = self._clock()
        self._refused[caller] = now
        self._logged = {each: at for each, at in self._logged.items() if now - at < SHOWN_SECONDS}
        if caller not in self._logged:
            self._logged[caller] = now
            log.warning("a stream is refused: its caller has too many", caller=caller, method=method)


def refusal_sentence(caller: str, server: str) -> str:
    """For an operator. server: which refuses the streams."""
    return (
        f"{server} refuses streams of {caller}, which has {STREAMS_PER_CALLER} of one method open: if other processes "
        "use its credentials, end them; if the credentials are known to others, replace the cluster's secret"
    )

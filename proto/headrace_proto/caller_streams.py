"""Bounds the streams that one caller has open on an internal server (docs/reliability.md R18)."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

# Of one method. A caller needs one; a connection that was lost may have others until that is detected. A further stream
# is refused and replaces none: what gRPC holds for a stream that is not read, it holds until its connection ends.
STREAMS_PER_CALLER = 8


class CallerStreams:
    """The open streams of each caller and method. Of one server."""

    def __init__(self) -> None:
        self._open: Counter[tuple[str, str]] = Counter()

    @contextmanager
    def count(self, method: str, caller: str) -> Iterator[bool]:
        """While the caller's stream is open, if it may be."""
        key = method, caller
        if self._open[key] >= STREAMS_PER_CALLER:
            yield False
            return
        self._open[key] += 1
        try:
            yield True
        finally:
            self._open[key] -= 1
            if not self._open[key]:
                del self._open[key]

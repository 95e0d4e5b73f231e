"""Bounds the streams that one caller has open on an internal server (docs/reliability.md R18)."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headrace_proto.served_call import ServedCall

# Of one method. A caller needs one; a connection that was lost may have another until that is detected.
STREAMS_PER_CALLER = 4


class CallerStreams:
    """The open streams of each caller and method: the newest replaces the oldest. Of one server."""

    def __init__(self) -> None:
        self._open: dict[tuple[str, str], list[ServedCall]] = {}  # oldest first

    @contextmanager
    def count(self, method: str, caller: str, context: Any) -> Iterator[None]:
        """While the caller's stream is open."""
        streams = self._open.setdefault((method, caller), [])
        streams.append(call := ServedCall(context))
        if len(streams) > STREAMS_PER_CALLER:
            streams.pop(0).end("a newer stream of this caller has replaced this one")
        try:
            yield
        finally:
            if call in streams:
                streams.remove(call)
                if not streams:
                    del self._open[method, caller]

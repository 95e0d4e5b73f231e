"""When a device computes, by a Chrome trace."""

from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
ON_HOST = {"cpu_op"}


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds. `span`: from the first start to the last end; `busy`: at least one event runs."""

    span: float
    busy: float
    longest_gap: float
    events: int


class _Event(msgspec.Struct):
    """A complete event of the trace event format ("ph": "X"); times in microseconds."""

    cat: str = ""
    ts: float = 0.0
    dur: float = 0.0


class _Trace(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")


def read_timeline(trace: bytes, on_device: bool) -> Timeline:
    """Of the device's kernels and copies, on all streams; or of the host's operators. Raises ValueError for none."""
    wanted = ON_DEVICE if on_device else ON_HOST
    events = msgspec.json.decode(trace, type=_Trace).events
    return merge((event.ts, event.ts + event.dur) for event in events if event.cat in wanted)


def merge(intervals: Iterable[tuple[float, float]]) -> Timeline:
    """Of (start, end) in microseconds, which may overlap."""
    ordered = sorted(intervals)
    if not ordered:
        raise ValueError("the trace has no event of the device")
    first, reached = ordered[0]
    busy, longest = reached - first, 0.0
    for start, end in ordered[1:]:
        if start > reached:
            longest = max(longest, start - reached)
            busy += end - start
            reached = end
        elif end > reached:
            busy += end - reached
            reached = end
    return Timeline((reached - first) / 1e6, busy / 1e6, longest / 1e6, len(ordered))

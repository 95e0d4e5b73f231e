"""The operators of a Chrome trace that took most of its time."""

from collections import defaultdict
from itertools import groupby
from operator import attrgetter

import msgspec

from headrace_worker.profiling.report import Operator

TOP = 8  # on the device, and on the host
_HOST, _DEVICE = {"cpu_op"}, {"kernel", "gpu_memcpy", "gpu_memset"}


class _Event(msgspec.Struct):
    """A complete event of the trace event format ("ph": "X"); times in µs. Other events lack some fields."""

    name: str = ""
    cat: str = ""
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0


class _Trace(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")


_decode = msgspec.json.Decoder(_Trace).decode


def top_operators(trace: bytes) -> list[Operator]:
    """The operators with the longest own time: on a GPU first, if there is one, then on the host.

    Operators of one thread are nested: the time of called ones is subtracted. Kernels are not nested.
    """
    events = _decode(trace).events
    device = _OperatorTimes()
    for event in events:
        if event.cat in _DEVICE:
            device.add(event.name, event.dur)
    host = _OperatorTimes()
    calls = sorted((event for event in events if event.cat in _HOST), key=lambda event: (event.ts, -event.dur))
    calls.sort(key=lambda event: str(event.tid))  # stable
    for _, thread in groupby(calls, key=attrgetter("tid")):
        stack: list[_Event] = []
        for event in thread:
            while stack and stack[-1].ts + stack[-1].dur <= event.ts:
                stack.pop()
            if stack:
                host.times[stack[-1].name] -= event.dur
            host.add(event.name, event.dur)
            stack.append(event)
    return [*device.top(True), *host.top(False)]


class _OperatorTimes:
    def __init__(self) -> None:
        self.times: defaultdict[str, float] = defaultdict(float)
        self._calls: defaultdict[str, int] = defaultdict(int)

    def add(self, name: str, time: float) -> None:
        self.times[name] += time
        self._calls[name] += 1

    def top(self, on_device: bool) -> list[Operator]:
        total = sum(self.times.values()) or 1.0
        longest = sorted(self.times.items(), key=lambda entry: -entry[1])[:TOP]
        return [Operator(name, self._calls[name], time / 1e3, time / total, on_device) for name, time in longest]

"""Which operators took the time of a Chrome trace."""

from collections import defaultdict
from itertools import groupby
from operator import attrgetter

import msgspec

from headrace_worker.profiling.report import Operator

TOP = 8  # of each side
_HOST, _DEVICE = {"cpu_op"}, {"kernel", "gpu_memcpy", "gpu_memset"}


class _Event(msgspec.Struct):
    """A complete event of the trace event format ("ph": "X"); times in microseconds. Others lack some of these."""

    name: str = ""
    cat: str = ""
    tid: int | str = 0
    ts: float = 0.0
    dur: float = 0.0


class _Trace(msgspec.Struct):
    events: list[_Event] = msgspec.field(name="traceEvents")


_decode = msgspec.json.Decoder(_Trace).decode


def top_operators(trace: bytes) -> list[Operator]:
    """Those with the longest time of their own: on a GPU first, if there is one, then on the host.

    Operators of one thread are nested: what one calls is taken from its time. Kernels are not.
    """
    events = _decode(trace).events
    device = _Tally()
    for event in events:
        if event.cat in _DEVICE:
            device.add(event.name, event.dur)
    host = _Tally()
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


class _Tally:
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

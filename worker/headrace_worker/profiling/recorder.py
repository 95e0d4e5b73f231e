"""Records with torch.profiler: operators on the host, kernels on a GPU if there is one."""

import gzip
import shutil
from collections import defaultdict
from contextlib import AbstractContextManager
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.profiler import ProfilerActivity, profile, record_function

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


_LEVEL = 3  # level of gzip: a tenth of the size at little cost


class TorchTraceRecorder:
    """One recording of the thread that starts it."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, acc_events=False, experimental_config=_trace_only_config())

    def start(self) -> None:
        self._profile.start()

    def stop(self) -> None:
        """Waits for the GPU, and collects the recorded events: some microseconds per operator."""
        self._profile.stop()

    def mark(self, name: str) -> AbstractContextManager[object]:
        return record_function(name)  # type: ignore[no-untyped-call, no-any-return, unused-ignore]

    def write(self, path: Path) -> list[Operator]:
        """A gzipped Chrome trace; the file at `path` appears atomically."""
        plain, part = path.with_suffix(".part"), path.with_suffix(".gz.part")
        try:
            self._profile.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(part, "wb", compresslevel=_LEVEL) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            operators = top_operators(plain.read_bytes())
            part.replace(path)
        finally:
            plain.unlink(missing_ok=True)
            part.unlink(missing_ok=True)
        return operators


def _trace_only_config() -> Any:
    """Disables the second form of every event for Python, which takes longer than recording; only the trace is used."""
    from torch._C._profiler import _ExperimentalConfig

    try:
        return _ExperimentalConfig(trace_only=True)
    except TypeError:  # older torch
        return None

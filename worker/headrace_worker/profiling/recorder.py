"""Records with torch.profiler: operators on the host, kernels on a GPU if there is one."""

import gzip
import shutil
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from headrace_worker.profiling.report import Operator
from headrace_worker.profiling.trace_table import top_operators

_LEVEL = 3  # of gzip: a tenth of the size at little cost


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

"""A recording device that also records streams, marks, pinned memory, blocks and the calls of NCCL, in one order.

The calls of a rank are in one list: in the order in which they were made, each with its thread and stream.
"""

import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from headrace_worker.device.rank_device import Download, GraphRecorder, Mark
from support.worker.recorders import CallingRecorder
from support.worker.recording_device import RecordedDownload, RecordedMark, RecordingDevice

CAPTURE = "capture"  # the stream of what is recorded, and not run


class Call(NamedTuple):
    """One call, on the current stream of its thread."""

    thread: str
    name: str
    stream: str
    mark: int = -1  # that is made or waited for; a download is one too
    memory: int = 0  # address of a pool, or of pinned memory
    blocks: tuple[int, ...] = ()  # of the pool
    group: str = ""  # of ranks


def read_trace(file: Path) -> list[Call]:
    """What `TracedDevice.write` wrote."""
    return [Call(**fields | {"blocks": tuple(fields["blocks"])}) for fields in json.loads(file.read_text())]


class PinnedCopy(NamedTuple):
    """An upload that may not be done, and what it copies."""

    stream: str
    after: int  # the last mark before it
    source: Tensor
    content: Tensor


class TracedMark(RecordedMark):
    """A mark with a number."""

    def __init__(self, device: "TracedDevice", stream: str, number: int) -> None:
        super().__init__(device, stream)
        self._traced, self.number = device, number

    def synchronize(self) -> None:
        self._traced.trace("mark.synchronize", mark=self.number)
        self._traced.check_pinned(self)


class TracedDownload(RecordedDownload):
    """A download with the number of the mark at its end."""

    def __init__(self, device: "TracedDevice", tensors: Sequence[Tensor], number: int) -> None:
        super().__init__(device, tensors)
        self._traced, self._number = device, number

    def wait(self) -> list[Tensor]:
        self._traced.trace("download.wait", mark=self._number)
        return self._tensors


class KvAccess(TorchDispatchMode):
    """Records the copies from and to blocks of KV pools that this thread launches."""

    def __init__(self, device: "TracedDevice") -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names = {"aten::index_select": "kv.read", "aten::index_copy_": "kv.write"}
        if (name := names.get(func.name().split(".")[0])) and (pool := self._device.pool_of(args[0])):
            self._device.trace(name, memory=pool, blocks=tuple(args[2].tolist()))
        return func(*args, **(kwargs or {}))


class TracedRecorder(CallingRecorder):
    """Runs a step while it records it, as CUDA does, so that its calls are in the trace."""

    def __init__(self, device: "TracedDevice") -> None:
        super().__init__()
        self._device = device

    def warm_up(self, step: Callable[[], None]) -> None:
        self._device.trace("graph.warm_up")
        super().warm_up(step)

    def record(self, step: Callable[[], None]) -> Callable[[], None]:
        self._device.trace("capture.begin")
        with self._device.on_stream(CAPTURE):
            step()
        self._device.trace("capture.end")
        replay = super().record(step)

        def traced() -> None:
            self._device.trace("graph.replay")
            replay()

        return traced


class TracedDevice(RecordingDevice):
    """Its ranks communicate as those of a GPU do."""

    uses_nccl = True

    def __init__(self) -> None:
        super().__init__()
        self._trace: list[Call] = []
        self._marks = 0
        self._pinned: list[Tensor] = []  # kept, so that addresses are unique
        self._in_flight: list[PinnedCopy] = []
        self._pools: dict[int, int] = {}  # address -> bytes
        self._order = threading.RLock()
        self.steps = TracedRecorder(self)

    def recorder(self) -> GraphRecorder:
        return self.steps

    def trace(self, name: str, **fields: Any) -> None:
        """A call of this thread, which must have called `use`."""
        super().note(name)
        self.trace_from_any_thread(name, **fields)

    def trace_from_any_thread(self, name: str, **fields: Any) -> None:
        """A call that does not use the thread's device."""
        with self._order:
            self._trace.append(Call(threading.current_thread().name, name, self.stream, **fields))

    def write(self, file: Path) -> None:
        """For `read_trace`."""
        with self._order:
            file.write_text(json.dumps([call._asdict() for call in self._trace]))

    def note(self, call: str, stream: str = "") -> None:
        super().note(call, stream)
        self.trace_from_any_thread(call)

    @contextlib.contextmanager
    def on_stream(self, name: str) -> Iterator[None]:
        before = self.stream
        self._streams.name = name
        try:
            yield
        finally:
            self._streams.name = before

    @contextlib.contextmanager
    def own_stream(self) -> Iterator[None]:  # type: ignore[override]
        with super().own_stream(), KvAccess(self):
            yield

    def add_pool(self, pool: Tensor) -> int:
        """Its address."""
        self._pools[pool.data_ptr()] = pool.nbytes
        return pool.data_ptr()

    def pool_of(self, part: Tensor) -> int:
        """The address of the pool that contains a tensor; 0 when none does."""
        at = part.data_ptr()
        return next((start for start, size in list(self._pools.items()) if start <= at < start + size), 0)

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        made = super().host_memory(shape, dtype)
        with self._order:
            self._pinned.append(made)
        return made

    def upload(self, tensor: Tensor) -> Tensor:
        with self._order:
            pinned = [one for one in self._pinned if one.data_ptr() == tensor.data_ptr()]
            if pinned:
                self._in_flight.append(PinnedCopy(self.stream, self._marks, tensor, tensor.clone()))
        self.trace("upload", memory=tensor.data_ptr() if pinned else 0)
        return tensor.clone()

    def check_pinned(self, reached: TracedMark) -> None:
        """Records `pinned.changed` if the source of a copy before a mark was written before the mark was reached."""
        with self._order:
            done = [copy for copy in self._in_flight if copy.stream == reached.stream and copy.after < reached.number]
            self._in_flight = [copy for copy in self._in_flight if not any(copy is one for one in done)]
        for copy in done:
            if not torch.equal(copy.source, copy.content):
                self.trace("pinned.changed", memory=copy.source.data_ptr())

    def download(self, tensors: Sequence[Tensor]) -> Download:
        number = self._new_mark("download")
        return TracedDownload(self, tensors, number)

    def mark(self) -> Mark:
        return TracedMark(self, self.stream, self._new_mark("mark"))

    def wait_for(self, mark: Mark) -> None:
        assert isinstance(mark, TracedMark)
        self.trace("wait_for", mark=mark.number)

    def _new_mark(self, name: str) -> int:
        with self._order:
            self._marks += 1
            number = self._marks
        self.trace(name, mark=number)
        return number

"""Devices for tests without a GPU. They compute on the CPU; they do not emulate CUDA."""

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace_worker.device.cpu import CpuDevice
from headrace_worker.device.rank_device import Download, GraphRecorder, Mark
from support.worker.recorders import CallingRecorder, make_recorder

RECORDING = {"device": "recording"}  # an option of a rank: it has a RecordingDevice


class ReplayingDevice(CpuDevice):
    """A CPU whose steps are recorded and replayed, as those of a GPU."""

    def __init__(self, recorder: CallingRecorder) -> None:
        super().__init__()
        self.steps = recorder

    def recorder(self) -> GraphRecorder:
        return self.steps


def replaying_device(fault: Mapping[str, Any] | None, notify: Callable[[], None] = lambda: None) -> CpuDevice:
    """`fault`: options of the recorder, see `make_recorder`, or RECORDING; None: steps are not recorded."""
    if fault == RECORDING:
        return RecordingDevice()
    return CpuDevice() if fault is None else ReplayingDevice(make_recorder(fault, notify))


class UnsetDeviceError(AssertionError):
    """A thread used the device before `use`: on CUDA it would have used the first visible GPU."""


class RecordedMark:
    """A mark with the thread and stream where it was made."""

    def __init__(self, device: "RecordingDevice", stream: str) -> None:
        self._device, self.stream = device, stream

    def synchronize(self) -> None:
        self._device.note("mark.synchronize", self.stream)

    def query(self) -> bool:
        return True


class RecordedDownload:
    """Notes when it is read."""

    def __init__(self, device: "RecordingDevice", tensors: Sequence[Tensor]) -> None:
        self._device, self._tensors = device, [tensor.clone() for tensor in tensors]

    def wait(self) -> list[Tensor]:
        self._device.note("download.wait")
        return self._tensors


class RecordingDevice(ReplayingDevice):
    """Takes the paths of an asynchronous device, and records the calls of each thread, in order.

    Raises UnsetDeviceError for a thread that has not called `use`.
    """

    asynchronous = True

    def __init__(self) -> None:
        super().__init__(CallingRecorder())
        self.calls: dict[str, list[str]] = {}  # by name of the thread
        self.lost: type[BaseException] | None = None  # an error that ends the device
        self.full: type[BaseException] | None = None  # one of a failed allocation
        self.free, self.peak = 1 << 30, 0  # bytes
        self._threads: set[int] = set()
        self._streams = threading.local()
        self._lock = threading.Lock()

    def note(self, call: str, stream: str = "") -> None:
        """Records a call of this thread; `stream`: of a mark."""
        if call != "use" and threading.get_ident() not in self._threads:
            raise UnsetDeviceError(f"{threading.current_thread().name} called {call} before use")
        with self._lock:
            self.calls.setdefault(threading.current_thread().name, []).append(f"{call} {stream}".strip())

    @property
    def stream(self) -> str:
        """This thread's current stream: the default one, or its own."""
        return getattr(self._streams, "name", "default")

    def use(self) -> None:
        self._threads.add(threading.get_ident())
        self.note("use")

    def free_memory(self) -> int:
        return self.free

    def total_memory(self) -> int:
        return 1 << 30

    def peak_bytes(self) -> int:
        return self.peak

    def release_cached(self) -> None:
        self.note("release_cached")

    def is_out_of_memory(self, error: BaseException) -> bool:
        return self.full is not None and isinstance(error, self.full)

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        self.note("host_memory")
        return super().host_memory(shape, dtype)

    def upload(self, tensor: Tensor) -> Tensor:
        self.note("upload")
        return tensor.clone()

    def upload_into(self, target: Tensor, tensor: Tensor) -> None:
        self.note("upload_into")
        super().upload_into(target, tensor)

    def download(self, tensors: Sequence[Tensor]) -> Download:
        self.note("download")
        return RecordedDownload(self, tensors)

    def mark(self) -> Mark:
        self.note("mark", self.stream)
        return RecordedMark(self, self.stream)

    def synchronize(self) -> None:
        self.note("synchronize", self.stream)

    def is_lost(self, error: BaseException) -> bool:
        return self.lost is not None and isinstance(error, self.lost)

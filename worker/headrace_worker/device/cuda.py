"""A GPU as the device of a rank."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from headrace_base.errors import DeviceError
from headrace_worker.device.gpu_faults import GpuFaultWatch
from headrace_worker.device.rank_device import GraphRecorder, Mark

T = TypeVar("T")

OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation: the only error of a launch after which the context still works
CAPTURE_ERRORS = range(900, 909)  # cudaErrorStreamCapture…: of a recording alone


class CudaDownload:
    """Copies to pinned memory, and the event after them."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.to("cpu", non_blocking=True) for tensor in tensors]  # pinned, by torch
        self._event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._event.record()

    def wait(self) -> list[Tensor]:
        self._event.synchronize()
        return self._tensors


class CudaRecorder:
    """Records CUDA graphs, all of which share one pool of memory.

    NCCL's collectives are recorded too: torch hides those that run under a capture from its watchdog thread, and lets
    that thread query earlier ones meanwhile (torch 2.7 and 2.9; at least 2.11 is required here).
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def allocate(self, make: Callable[[], T]) -> T:
        return make()

    def warm_up(self, step: Callable[[], object]) -> None:
        """Compiles kernels and initialises libraries, NCCL's connections for this size included: not recordable."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            step()
        current.wait_stream(self._stream)

    def record(self, step: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], Sequence[Tensor]]:
        """The outputs do not keep their memory for themselves: other recordings use it, too."""
        graph = torch.cuda.CUDAGraph()
        # "thread_local": by default a call of any thread that could wait for the device (memory that is pinned, freed
        # by the garbage collector, or allocated by a library) would invalidate the recording.
        # The outer context: where a recording fails, `torch.cuda.graph` leaves its stream the current one.
        with (
            torch.cuda.stream(torch.cuda.current_stream(self._device)),
            torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
        ):
            outputs = step()
        return graph.replay, [_borrowed(output) for output in outputs]

    def seconds(self, replay: Callable[[], None]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        replay()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3


class _Memory:
    """Bytes of the device at an address, for torch, which does not own them."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2}


def _borrowed(tensor: Tensor) -> Tensor:
    """The same tensor, without a share in its memory. A recording's memory lives as long as the recording."""
    storage = tensor.untyped_storage()
    held = torch.as_tensor(_Memory(storage.data_ptr(), storage.nbytes()), device=tensor.device)
    return held.view(tensor.dtype).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


class CudaDevice:
    """Implements `RankDevice`."""

    asynchronous = True
    uses_nccl = True

    def __init__(self, index: int) -> None:
        """index: among the GPUs that this process may see. Raises DeviceError when it cannot be used."""
        self.torch_device = torch.device("cuda", index)
        self._allocated = 0  # bytes, at the last `reset_peak`
        try:
            self.use()
            torch.zeros(1, device=self.torch_device)
        except RuntimeError as error:
            raise DeviceError(
                f"GPU {index} cannot be used ({type(error).__name__}): see which processes use it with nvidia-smi, and "
                "CUDA_VISIBLE_DEVICES for what this process may see"
            ) from error

    def use(self) -> None:
        torch.cuda.set_device(self.torch_device)

    def watch_faults(self, on_fault: Callable[[str], None]) -> Callable[[], None]:
        uuid = torch.cuda.get_device_properties(self.torch_device).uuid
        return GpuFaultWatch(str(self.torch_device), f"GPU-{uuid}", on_fault).stop

    def free_memory(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def total_memory(self) -> int:
        return int(torch.cuda.mem_get_info(self.torch_device)[1])

    def reset_peak(self) -> None:
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.torch_device)
        self._allocated = torch.cuda.memory_allocated(self.torch_device)

    def peak_bytes(self) -> int:
        return int(torch.cuda.max_memory_reserved(self.torch_device)) - self._allocated

    def release_cached(self) -> None:
        torch.cuda.synchronize(self.torch_device)
        torch.cuda.empty_cache()

    def host_memory(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=True)

    def upload(self, tensor: Tensor) -> Tensor:
        return tensor.pin_memory().to(self.torch_device, non_blocking=True)

    def upload_into(self, target: Tensor, tensor: Tensor) -> None:
        target.copy_(tensor.pin_memory(), non_blocking=True)

    def download(self, tensors: Sequence[Tensor]) -> CudaDownload:
        return CudaDownload(tensors)

    def mark(self) -> Mark:
        # Threads of transfers wait for marks, for up to a step: by default they would take a core each meanwhile.
        event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.torch_device))
        return event  # type: ignore[no-any-return]

    def synchronize(self) -> None:
        torch.cuda.current_stream(self.torch_device).synchronize()

    def recorder(self) -> GraphRecorder | None:
        return CudaRecorder(self.torch_device)

    def is_out_of_memory(self, error: BaseException) -> bool:
        if isinstance(error, torch.AcceleratorError):
            return getattr(error, "error_code", None) == OUT_OF_MEMORY
        return isinstance(error, torch.OutOfMemoryError)

    def is_lost(self, error: BaseException) -> bool:
        """An error of a kernel, a copy or a library is one of the whole CUDA context, in which every later call fails.

        Libraries raise others for it, and a recording may hide it; then the device is asked, which waits for what it
        runs.
        """
        if self.is_out_of_memory(error):
            return False
        if isinstance(error, torch.AcceleratorError) and getattr(error, "error_code", None) not in CAPTURE_ERRORS:
            return True
        try:
            torch.cuda.synchronize(self.torch_device)
        except RuntimeError:
            return True
        return False

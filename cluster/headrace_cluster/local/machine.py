"""Cores, memory and GPUs of this machine, for a Ray that is started on it. Imports neither torch nor Ray."""

import os
from dataclasses import dataclass
from pathlib import Path

from headrace_worker.device.memory import available_cores, available_memory

# AMD's, and NVIDIA's where the bindings are missing: Ray and torch can use them, but they are not counted here.
_UNCOUNTED_GPUS = (Path("/dev/kfd"), Path("/dev/nvidiactl"))


@dataclass(frozen=True, slots=True)
class Machine:
    """Limits of the ranks that are placed here."""

    cores: int
    memory: int  # bytes that are free
    gpus: int | None  # as Ray counts them; None: unknown
    gpu_memory: int = 0  # bytes of the largest GPU


def this_machine() -> Machine:
    """Takes milliseconds."""
    memories = _nvidia_memory()
    return Machine(available_cores(), available_memory(), _gpu_count(len(memories)), max(memories, default=0))


def _gpu_count(found: int) -> int | None:
    """As Ray counts them; None when GPUs are here that were not found."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "NoDevFiles"):
        return 0
    if not found and any(path.exists() for path in _UNCOUNTED_GPUS):
        return None
    return found if visible is None else min(found, len(visible.split(",")))


def _nvidia_memory() -> tuple[int, ...]:
    """Bytes of each NVIDIA GPU, from the driver's management library (NVML); empty without it or its bindings."""
    try:
        import pynvml
    except ImportError:
        return ()

    def memory_of(index: int) -> int:
        try:
            return int(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(index)).total)
        except pynvml.NVMLError:
            return 0  # a GPU that does not answer is counted, as Ray does

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(memory_of(index) for index in range(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return ()
    finally:
        pynvml.nvmlShutdown()

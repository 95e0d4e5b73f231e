"""Cores, memory and GPUs of this machine, for a Ray that is started on it. Imports neither torch nor Ray."""

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

from headrace_worker.device.memory import available_cores, available_memory

_OTHER_GPUS = Path("/dev/kfd")  # AMD's: Ray and torch can use them, but they are not counted here


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
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count: int | None = len(memories)
    if visible is not None:
        count = min(len(memories), len(visible.split(",")) if visible not in ("", "NoDevFiles") else 0)
    elif not memories and _OTHER_GPUS.exists():
        count = None
    return Machine(available_cores(), available_memory(), count, max(memories, default=0))


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def _nvidia_memory() -> tuple[int, ...]:
    """Bytes of each NVIDIA GPU, from the driver's management library (NVML); empty without a driver."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ()
    if nvml.nvmlInit_v2():
        return ()
    count = ctypes.c_uint()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    memories = []
    for index in range(count.value):
        handle, memory = ctypes.c_void_p(), _Memory()
        nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle))
        nvml.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory))
        memories.append(int(memory.total))
    nvml.nvmlShutdown()
    return tuple(memories)

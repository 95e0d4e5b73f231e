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


def this_machine() -> Machine:
    """Takes milliseconds."""
    return Machine(available_cores(), available_memory(), _gpu_count(_nvidia_count()))


def _gpu_count(found: int) -> int | None:
    """As Ray counts them; None when GPUs are here that were not found."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible in ("", "NoDevFiles"):
        return 0
    if not found and any(path.exists() for path in _UNCOUNTED_GPUS):
        return None
    return found if visible is None else min(found, len(visible.split(",")))


def _nvidia_count() -> int:
    """GPUs that the driver's management library (NVML) lists; 0 without it or its bindings."""
    try:
        import pynvml
    except ImportError:
        return 0
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return int(pynvml.nvmlDeviceGetCount())
    except pynvml.NVMLError:
        return 0
    finally:
        pynvml.nvmlShutdown()

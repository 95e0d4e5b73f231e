"""Which device, dtype and thread count a rank uses."""

import os

import torch

from headrace_proto.errors import DeviceError
from headrace_worker.device.dtypes import dtype_name
from headrace_worker.device.memory import available_memory


def choose_device(wanted: str) -> torch.device:
    """auto = cuda when there is a usable GPU. Raises DeviceError when the requested device is not available."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.split(":")[0] not in ("cpu", "cuda"):
        raise DeviceError(f"device {wanted!r} is unknown: use auto, cpu or cuda.")
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        reason = "no NVIDIA GPU is usable" if torch.version.cuda else "this torch was built without CUDA"
        raise DeviceError(f"--device cuda: {reason}. Use --device cpu, or install a CUDA build of torch.")
    return torch.device(wanted)


def use_device(device: torch.device) -> None:
    """Make it this thread's current device. A thread starts with the first visible GPU, and kernels and streams use the
    current device by default: every thread that computes on another one must call this.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def choose_dtype(wanted: str, device: torch.device, deterministic: bool = False) -> torch.dtype:
    """See `dtypes.dtype_name`. Raises DeviceError."""
    dtype: torch.dtype = getattr(torch, dtype_name(wanted, device.type, deterministic))
    return dtype


def set_threads(wanted: int | None) -> int:
    """Set torch's threads of this process (Ray starts actors with one) and return their number."""
    count = (
        wanted or len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else wanted or os.cpu_count() or 1
    )
    torch.set_num_threads(count)
    return count


def free_memory(device: torch.device) -> int:
    """Bytes that this process may still allocate on `device`, container limits respected."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_memory()

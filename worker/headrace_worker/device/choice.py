"""Which device, dtype and thread count a rank uses."""

import os

import torch

from headrace_proto.errors import DeviceError
from headrace_worker.device.cpu import CpuDevice
from headrace_worker.device.cuda import CudaDevice
from headrace_worker.device.dtypes import dtype_name
from headrace_worker.device.rank_device import RankDevice


def open_device(wanted: str) -> RankDevice:
    """auto = the first GPU that is visible, if any; else cpu, cuda or cuda:N. Raises DeviceError."""
    kind, _, index = wanted.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index and not index.isdecimal()):
        raise DeviceError(f"device {wanted!r} is unknown: use auto, cpu or cuda.")
    if kind == "cpu" or (kind == "auto" and not torch.cuda.is_available()):
        return CpuDevice()
    if not torch.cuda.is_available():
        reason = "no NVIDIA GPU is usable" if torch.version.cuda else "this torch was built without CUDA"
        raise DeviceError(f"--device cuda: {reason}. Use --device cpu, or install a CUDA build of torch.")
    return CudaDevice(int(index or 0))


def choose_dtype(wanted: str, device_type: str, deterministic: bool = False) -> torch.dtype:
    """See `dtypes.dtype_name`. Raises DeviceError."""
    dtype: torch.dtype = getattr(torch, dtype_name(wanted, device_type, deterministic))
    return dtype


def set_threads(wanted: int | None) -> int:
    """Set torch's threads of this process (Ray starts actors with one) and return their number."""
    count = (
        wanted or len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else wanted or os.cpu_count() or 1
    )
    torch.set_num_threads(count)
    return count

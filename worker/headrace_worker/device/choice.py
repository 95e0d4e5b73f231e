"""Which device, dtype and thread count a rank uses."""

import os
import threading

import torch

from headrace_base.errors import DeviceError
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


def use_threads(wanted: int | None) -> int:
    """Lets this thread compute with `wanted` threads, by default all of its processors; returns their number.

    Any other thread of the process computes alone, unless it has computed before. OpenMP keeps a team for each thread
    that ever computed with several, and with more threads in teams than processors every barrier sleeps: decoding took
    2.3 times as long.
    """
    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(wanted or available)
    count = torch.get_num_threads()  # a thread's first look at its number takes the process's, which changes below
    others = threading.Thread(target=torch.set_num_threads, args=(1,))  # the process's: of threads that come later
    others.start()
    others.join()
    return count

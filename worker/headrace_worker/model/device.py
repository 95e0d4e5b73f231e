"""Which device, dtype and thread count a rank uses."""

import os

import torch

from headrace_proto.errors import DeviceError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_device(wanted: str) -> torch.device:
    """auto = cuda when there is a usable one. Raises DeviceError when what is asked for is absent."""
    if wanted == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if wanted.split(":")[0] not in ("cpu", "cuda"):
        raise DeviceError(f"device {wanted!r} is unknown: use auto, cpu or cuda.")
    if wanted.startswith("cuda") and not torch.cuda.is_available():
        reason = "no NVIDIA GPU is usable" if torch.version.cuda else "this torch was built without CUDA"
        raise DeviceError(f"--device cuda: {reason}. Use --device cpu, or install a CUDA build of torch.")
    return torch.device(wanted)


def use_device(device: torch.device) -> None:
    """Make it this thread's current device. A thread starts with the first GPU that its process sees, and kernels and
    streams that are not told otherwise are of the current one: every thread that computes on another must say so.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def choose_dtype(wanted: str, device: torch.device, deterministic: bool = False) -> torch.dtype:
    """auto = bfloat16 on a GPU and on a CPU with a bfloat16 matrix unit (AMX); float32 elsewhere.

    AVX512_BF16 alone is no reason: its dot products help oneDNN's large products only, while attention, norms and
    small batches convert to float32 and back. `deterministic` needs float32 on a CPU. Raises DeviceError.
    """
    if deterministic and device.type == "cpu":
        if wanted not in ("auto", "float32"):
            raise DeviceError(f"--deterministic runs in float32 on a CPU: leave --dtype {wanted} out.")
        return torch.float32
    if wanted == "auto":
        if device.type == "cuda" or "amx_bf16" in cpu_flags():
            return torch.bfloat16
        return torch.float32
    if wanted not in _DTYPES:
        raise DeviceError(f"dtype {wanted!r} is unknown: use auto, {', '.join(_DTYPES)}.")
    return _DTYPES[wanted]


def cpu_flags() -> frozenset[str]:
    """Instruction set flags as Linux names them; empty where they cannot be read."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith(("flags", "Features")):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def set_threads(wanted: int | None) -> int:
    """Set torch's threads of this process (Ray starts actors with one) and return their number."""
    count = (
        wanted or len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else wanted or os.cpu_count() or 1
    )
    torch.set_num_threads(count)
    return count

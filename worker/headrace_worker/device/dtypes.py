"""Which dtype a rank computes in. Imports no torch."""

from typing import get_args

from headrace_base.errors import DeviceError
from headrace_worker.core.config import DtypeName

ELEMENT_BYTES = {name: 4 if name == "float32" else 2 for name in get_args(DtypeName)}


def dtype_name(wanted: str, device_type: str, deterministic: bool = False) -> str:
    """auto = bfloat16 on a GPU and on a CPU with a bfloat16 matrix unit (AMX); float32 elsewhere.

    AVX512_BF16 alone is not sufficient: its dot products speed up oneDNN's large products only, while attention, norms
    and small batches convert to float32 and back. `deterministic` needs float32 on a CPU. Raises DeviceError.
    """
    if deterministic and device_type == "cpu":
        if wanted not in ("auto", "float32"):
            raise DeviceError(f"--deterministic runs in float32 on a CPU: leave --dtype {wanted} out.")
        return "float32"
    if wanted == "auto":
        return "bfloat16" if device_type == "cuda" or "amx_bf16" in cpu_flags() else "float32"
    if wanted not in ELEMENT_BYTES:
        raise DeviceError(f"dtype {wanted!r} is unknown: use auto, {', '.join(ELEMENT_BYTES)}.")
    return wanted


def cpu_flags() -> frozenset[str]:
    """Instruction set flags with Linux's names; empty if they cannot be read."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith(("flags", "Features")):
                    return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()

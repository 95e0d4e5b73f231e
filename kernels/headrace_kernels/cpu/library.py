"""The compiled library, bound to Python.

OpenMP: the library is linked without a runtime of its own and resolves its OpenMP calls in the runtime that torch has
loaded, so both share one thread pool. Two pools would compete for the same cores while spinning.
"""

import ctypes
import functools
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace_kernels.arguments import KernelArgumentError
from headrace_kernels.cpu.compile_library import TARGETS, KernelBuildError, find_library

SWITCH = "HEADRACE_CPU_KERNELS"

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
_CODES = {"p": _POINTER, "i": _INT, "f": _FLOAT}

# Argument types by function: p pointer, i int64, f float.
_SIGNATURES = {
    "headrace_attention": "ppiippipppiiiiiiiiififpi",
    "headrace_select_keys": "ppppiippppiiiiiiii",
    "headrace_write_kv": "piipiippipiiiii",
    "headrace_rms_norm": "ppipiifi",
    "headrace_add_rms_norm": "pppipipiifi",
    "headrace_activate": "ppipiiiii",
    "headrace_curve": "ppiiiii",
    "headrace_rope": "piiipiiipipiiii",
    "headrace_packed_matmul": "ppipiiiiiiffpii",
    "headrace_has_bfloat16_products": "",
    "headrace_layers": "pppppipipiiii",
    "headrace_layer_bytes": "",
    "headrace_packed_rows": "ppipiiiiiiff",
    "headrace_causal_conv": "ppipppiiiiiipppii",
    "headrace_delta_rule": "ppipipipippiiiiiipppii",
    "headrace_ssd": "ppipippipippffpipppiiiiiii",
    "headrace_selective_scan": "ppipippipippippipppiiiii",
    "headrace_gated_rms_norm": "ppipipiiifii",
    "headrace_row_logsumexp": "ppiiii",
    "headrace_draw": "pppippppiii",
    "headrace_exchange_sum": "ppiiiipip",
    "headrace_exchange_gather": "pppiiiipip",
}

# Functions that return a number: a status, or a fact. The others return nothing.
_RETURN_NUMBER = {
    "headrace_attention", "headrace_select_keys", "headrace_write_kv", "headrace_layers", "headrace_layer_bytes",
    "headrace_has_bfloat16_products", "headrace_packed_rows", "headrace_causal_conv", "headrace_delta_rule",
    "headrace_ssd", "headrace_selective_scan",
}  # fmt: skip
UNSUPPORTED = 1  # valid, but beyond what the C++ code was written for: torch runs instead
_REFUSALS = {
    2: "query_starts or seq_lens describe tokens or keys that do not exist",
    3: "a block table is too short for its sequence, or names a block outside of the pool",
    4: "a slot is outside of the pool",
}


@functools.cache
def missing() -> str | None:
    """Why the C++ kernels cannot run here, as a sentence; None if they can. Compiles them if necessary."""
    switch = _switch()
    names = ("on", "off", *(target.name for target in TARGETS))
    if switch not in names:
        return f"{SWITCH}={switch[:40]} is none of {', '.join(names)}"
    if switch == "off":
        return f"{SWITCH}=off"
    try:
        load()
    except KernelBuildError as error:
        return str(error)
    return None


def _switch() -> str:
    return os.environ.get(SWITCH, "on").lower()


def description() -> str:
    """What the kernels are made for, and where."""
    found = find_library(None if _switch() == "on" else _switch())
    return f"C++ for {found.target.title}, {'prebuilt' if found.prebuilt else 'compiled here'}"


def has_bfloat16_products() -> bool:
    """Whether the CPU multiplies bfloat16 by itself: without, products in float32 are faster."""
    return bool(load().headrace_has_bfloat16_products())


@functools.cache
def load() -> ctypes.CDLL:
    """The library with argument types set; calls release the GIL. Raises KernelBuildError."""
    path = find_library(None if _switch() == "on" else _switch()).path
    torch.get_num_threads()  # torch starts its OpenMP runtime before ours looks for it
    runtime = _openmp_runtime()
    if runtime is None:
        raise KernelBuildError("this build of torch has no GNU-compatible OpenMP runtime to share")
    try:
        ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
        library = ctypes.CDLL(str(path))
        for name, codes in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = [_CODES[code] for code in codes]
            function.restype = ctypes.c_int64 if name in _RETURN_NUMBER else None
    except (OSError, AttributeError) as error:
        raise KernelBuildError(f"the compiled kernels do not load ({type(error).__name__})") from error
    return library


class _Part(ctypes.Structure):
    _fields_ = [("data", _POINTER), *((name, _INT) for name in ("block", "head", "row"))]


def part_of(part: Tensor, *, one_head: bool = False) -> Any:
    """Keys or values [B, K, P, D] as an argument. one_head: to which all groups of query heads attend."""
    block, head, row, _ = part.stride()
    return ctypes.byref(_Part(part.data_ptr(), block, 0 if one_head else head, row))


def check_status(op: str, status: int) -> None:
    """Raises KernelArgumentError unless the status is 0."""
    if status:
        raise KernelArgumentError(f"{op}: {_REFUSALS[status]}. This is a bug: please report it.")


def _openmp_runtime() -> str | None:
    """Path of the OpenMP runtime in this process: torch's own if several are mapped."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    mapped = {line.split(maxsplit=5)[5] for line in lines if line.count("/") and len(line.split(maxsplit=5)) == 6}
    runtimes = [path for path in sorted(mapped) if Path(path).name.startswith(("libgomp", "libiomp5", "libomp"))]
    torch_root = str(Path(torch.__file__).parent.parent)
    runtimes.sort(key=lambda path: not path.startswith(torch_root))
    return runtimes[0] if runtimes else None

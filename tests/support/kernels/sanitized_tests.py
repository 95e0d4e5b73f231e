"""Tests of the C++ kernels, whose library is built with AddressSanitizer and UndefinedBehaviorSanitizer.

A separate process, in which the sanitizers' runtimes are loaded first: test_sanitizers.py starts it. An access outside
of a tensor ends it. With the argument `overflow` it makes such an access.
"""

import os
import sys
from pathlib import Path

import pytest
import torch

from headrace_kernels.cpu import compile_library

TESTS = Path(__file__).parents[2]
FILES = (
    *(f"kernels/test_{name}.py" for name in ("agreement", "attention", "bounds", "cache", "elementwise", "exchange")),
    *(f"kernels/test_{name}.py" for name in ("draw", "packed", "recurrent", "scans", "uneven")),
    "worker/model/test_native_layers.py",
)
_CHECKS = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
vars(compile_library)["_FLAGS"] = (*(flag for flag in compile_library._FLAGS if flag != "-O3"), *_CHECKS)
vars(compile_library)["_TIMEOUT_S"] = 600

if __name__ == "__main__":
    os.environ.pop("LD_PRELOAD", None)  # this process has the runtimes; the compiler would be slow with them
    if "overflow" in sys.argv:
        from headrace_kernels.cpu.library import load

        out, x, weight = torch.empty(8), torch.ones(8), torch.ones(4)
        load().headrace_rms_norm(out.data_ptr(), x.data_ptr(), 8, weight.data_ptr(), 1, 8, 1e-5, 1)
    else:
        options = ("-q", "-s", "-x", "-p", "no:cacheprovider", "-o", "timeout=0")
        sys.exit(pytest.main([*options, *(str(TESTS / file) for file in FILES)]))

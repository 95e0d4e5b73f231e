"""The C++ kernels under AddressSanitizer and UndefinedBehaviorSanitizer, as the tests of the ops call them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from headrace_kernels.cpu import compile_library

ROOT = Path(__file__).parents[2]
RUNTIMES = ("libasan.so", "libubsan.so")


def _runtimes() -> list[str]:
    """Paths of GCC's sanitizer runtimes; empty without them, or with another compiler."""
    compiler = compile_library.find_compiler()
    if compiler is None:
        return []
    found = [
        subprocess.run([compiler, f"-print-file-name={name}"], capture_output=True, text=True, check=False).stdout
        for name in RUNTIMES
    ]
    return [path.strip() for path in found if Path(path.strip()).is_file()]


def _run(cache: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    runtimes = _runtimes()
    if len(runtimes) != len(RUNTIMES):
        pytest.skip("no sanitizers: apt-get install g++")
    environment = {
        "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in ("kernels", "proto", "worker", "tests")),
        "HEADRACE_CPU_KERNELS": "on",
        "HEADRACE_TRITON": "off",
        "XDG_CACHE_HOME": str(cache),
        "LD_PRELOAD": " ".join(runtimes),
        # Python and torch keep memory until the end; with the other one GCC 13 aligns vectors wrongly (its bug 110027).
        "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }
    return subprocess.run(
        [sys.executable, "-m", "support.kernels.sanitized_tests", *arguments],
        cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True, timeout=1200, check=False,
    )  # fmt: skip


def test_no_op_accesses_memory_outside_of_its_tensors(tmp_path: Path) -> None:
    done = _run(tmp_path)
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]


def test_such_an_access_would_be_found(tmp_path: Path) -> None:
    done = _run(tmp_path, "overflow")
    assert done.returncode != 0 and "heap-buffer-overflow" in done.stderr

"""The tests of the kernels, which run compiled on a machine with a GPU; the first failure does not end them."""

import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from gpu_bench.section import NO_MODEL, Figure, Section, SectionRun

ROOT = Path(__file__).parents[3]
KERNEL_TESTS = ROOT / "tests" / "kernels"
# The C++ library, and the compiler for GPUs: no device is part of them.
OF_THE_CPU = ("test_build.py", "test_sanitizers.py", "test_compiles.py")
SMALL_FILES = (KERNEL_TESTS / "test_elementwise.py", KERNEL_TESTS / "test_recordable.py")
PROCESSES = 8  # at a time: most of the time is spent on compiling, by one core each
NONE_SELECTED = 5  # pytest's exit status
SMALL = ("-k", "test_rows_match or test_every_op_has_a_reference or silu")
_OUTCOME = re.compile(r"^(\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b", re.MULTILINE)


def run(run: SectionRun) -> Iterator[Figure]:
    outcomes: Counter[str] = Counter()
    failed: list[str] = []
    every = [file for file in sorted(KERNEL_TESTS.glob("test_*.py")) if file.name not in OF_THE_CPU]
    files = SMALL_FILES if run.small else every
    processes = max(1, min(PROCESSES, (os.cpu_count() or 1) // 2))
    with ThreadPoolExecutor(processes) as pool:
        # A process per file: after the first fault of a CUDA context, everything else in its process fails, too.
        for file, (output, problem) in zip(files, pool.map(lambda file: _run_file(file, run), files), strict=True):
            print(output, flush=True)
            for test, outcome in _OUTCOME.findall(output):
                outcomes[outcome] += 1
                if outcome in ("FAILED", "ERROR"):
                    failed.append(test.removeprefix("tests/kernels/"))
            if problem:
                failed.append(f"{file.name}: {problem}")
    yield Figure("passed tests", outcomes["PASSED"], "tests", extra={"skipped": outcomes["SKIPPED"]})
    yield Figure.check("all kernel tests pass", not failed, failed=failed)


def _run_file(file: Path, run: SectionRun) -> tuple[str, str]:
    """Its output, and what was wrong; nothing is if its tests pass, or none is selected."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", str(file)]
    command += SMALL if run.small else ()
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    return done.stdout, "" if done.returncode in (0, NONE_SELECTED) else f"status {done.returncode}"


SECTION = Section("kernels", "the tests of all kernels, compiled", (NO_MODEL,), 190, run)

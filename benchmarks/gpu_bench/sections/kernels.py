"""The tests of the kernels, which run compiled on a machine with a GPU; the first failure does not end them."""

import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from gpu_bench.figure import Figure
from gpu_bench.section import NO_MODEL, Section, SectionRun

ROOT = Path(__file__).parents[3]
KERNEL_TESTS = ROOT / "tests" / "kernels"
SMALL_FILES = (KERNEL_TESTS / "test_elementwise.py", KERNEL_TESTS / "test_recordable.py")
RESERVED_SECONDS = 15.0  # to report what has run
NONE_SELECTED = 5  # pytest's exit status
SMALL = ("-k", "test_rows_match or test_every_op_has_a_reference or silu")
_OUTCOME = re.compile(r"^(\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b")


def run(run: SectionRun) -> Iterator[Figure]:
    outcomes: Counter[str] = Counter()
    failed: list[str] = []
    for file in SMALL_FILES if run.small else sorted(KERNEL_TESTS.glob("test_*.py")):
        # A process per file: after the first fault of a CUDA context, everything else in its process fails, too.
        if status := _run_file(file, run, outcomes, failed):
            failed.append(f"{file.name}: status {status}")
    yield Figure("passed tests", outcomes["PASSED"], "tests", extra={"skipped": outcomes["SKIPPED"]})
    yield Figure.check("all kernel tests pass", not failed, failed=failed)


def _run_file(file: Path, run: SectionRun, outcomes: Counter[str], failed: list[str]) -> int:
    """Its status; 0 when its tests pass, or when none is selected."""
    seconds = run.ends_at - time.monotonic() - RESERVED_SECONDS
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "not slow", str(file)]
    command += SMALL if run.small else ()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    timer = threading.Timer(max(0.0, seconds), process.send_signal, [signal.SIGKILL])
    timer.start()
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if found := _OUTCOME.match(line):
            outcomes[found[2]] += 1
            if found[2] in ("FAILED", "ERROR"):
                failed.append(found[1].removeprefix("tests/kernels/"))
    status = process.wait()
    timer.cancel()
    return 0 if status == NONE_SELECTED else status


SECTION = Section("kernels", "the tests of all kernels, compiled", (NO_MODEL,), 300, run)

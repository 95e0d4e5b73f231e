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
RESERVED_SECONDS = 15.0  # to report what has run
SMALL = ("-k", "test_rows_match or test_every_op_has_a_reference or silu")
_OUTCOME = re.compile(r"^(\S+::.+?) (PASSED|FAILED|SKIPPED|ERROR|XFAIL|XPASS)\b")


def run(run: SectionRun) -> Iterator[Figure]:
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-m", "not slow", "tests/kernels"]
    command += SMALL if run.small else ()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    timer = threading.Timer(run.ends_at - time.monotonic() - RESERVED_SECONDS, process.send_signal, [signal.SIGKILL])
    timer.start()
    outcomes: Counter[str] = Counter()
    failed = []
    assert process.stdout is not None
    for line in process.stdout:
        print(line, end="", flush=True)
        if found := _OUTCOME.match(line):
            outcomes[found[2]] += 1
            if found[2] in ("FAILED", "ERROR"):
                failed.append(found[1].removeprefix("tests/kernels/"))
    status = process.wait()
    timer.cancel()
    yield Figure("passed tests", outcomes["PASSED"], "tests", extra={"skipped": outcomes["SKIPPED"]})
    yield Figure.check("all kernel tests pass", status == 0 and not failed, failed=failed, status=status)


SECTION = Section("kernels", "the tests of all kernels, compiled", (NO_MODEL,), 300, run)

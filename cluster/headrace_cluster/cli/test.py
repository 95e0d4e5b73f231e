"""`headrace test`: all checks for a change, and a short summary."""

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from headrace_cluster.errors import SpecError

PYTHON = [sys.executable, "-m"]
PYTEST = ["pytest", "--durations=20"]
COVERAGE = ".coverage.json"  # in the checkout
FAST = "not slow and not ci"


def checkout() -> Path:
    """The checkout that this package is installed from. Raises SpecError."""
    for folder in Path(__file__).resolve().parents:
        if (folder / "pyproject.toml").is_file() and (folder / "tests").is_dir():
            return folder
    raise SpecError("`headrace test` works in a checkout of the project; clone it and run ./headrace test there")


def run_tests(rest: list[str], *, ci: bool, slow: bool) -> int:
    """Runs the steps and prints a summary; 0 if all passed. With `rest`, pytest's arguments, pytest alone runs."""
    steps = chosen_tests(rest, ci=ci, slow=slow) if rest or slow else full_check(ci=ci)
    results = [result for group in steps for result in _run(group)]
    print("== summary")
    for step, code, seconds in results:
        print(f"{'passed' if code == 0 else 'FAILED':8}{step.name:24}{seconds:7.1f} s")
    return 0 if all(code == 0 for _, code, _ in results) else 1


@dataclass(frozen=True, slots=True)
class Step:
    """One command. The output of a quiet one is shown when it has ended."""

    name: str
    command: list[str]
    quiet: bool = False


def chosen_tests(rest: list[str], *, ci: bool, slow: bool) -> list[list[Step]]:
    """The tests that pytest's arguments select."""
    marks = "slow" if slow else "not slow" if ci or rest else FAST
    return [[Step("pytest", [*PYTHON, *PYTEST, *([] if "-m" in rest else ["-m", marks]), *rest])]]


def full_check(*, ci: bool) -> list[list[Step]]:
    """Groups of steps, one after the other; the steps of a group run side by side.

    Tests that measure time, or need the machine for themselves, are marked `alone` and come after the others. CI
    measures the coverage of the others only, since measuring changes times, and prints it last.
    """
    static = [
        Step("ruff check", [*PYTHON, "ruff", "check", "--no-cache", "."], quiet=True),
        Step("ruff format", [*PYTHON, "ruff", "format", "--no-cache", "--check", "."], quiet=True),
        Step("mypy", [*PYTHON, "mypy"], quiet=True),
    ]
    marks = "not slow" if ci else FAST
    beside = [*PYTEST, "-n", "2", "--dist", "loadfile", "-m", f"not alone and {marks}"]
    alone = Step("pytest, one by one", [*PYTHON, *PYTEST, "-m", f"alone and {marks}"])
    if not ci:
        return [[*static, Step("pytest, side by side", [*PYTHON, *beside])], [alone]]
    measured = Step("pytest, side by side", [*PYTHON, "slipcover", "--json", "--out", COVERAGE, "-m", *beside])
    coverage = Step("coverage", [*PYTHON, "headrace_cluster.cli.coverage_table", COVERAGE])
    return [[*static, measured], [alone], [coverage]]


def _run(steps: list[Step]) -> list[tuple[Step, int, float]]:
    started = []
    for step in steps:
        print(f"== {step.name}", flush=True)
        stdout, stderr = (subprocess.PIPE, subprocess.STDOUT) if step.quiet else (None, None)
        process = subprocess.Popen(step.command, cwd=checkout(), stdout=stdout, stderr=stderr)
        started.append((step, process, time.monotonic()))
    results = []
    for step, process, began in started:
        output, _ = process.communicate()
        if output and process.returncode != 0:
            print(f"== {step.name}\n{output.decode(errors='replace')}", flush=True)
        results.append((step, process.returncode, time.monotonic() - began))
    return results

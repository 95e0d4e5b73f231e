"""`headrace test`: everything that a change must pass, and a short summary."""

import subprocess
import sys
import time
from pathlib import Path

from headrace_cluster.errors import SpecError


def checkout() -> Path:
    """The checkout that this package is installed from. Raises SpecError."""
    for folder in Path(__file__).resolve().parents:
        if (folder / "pyproject.toml").is_file() and (folder / "tests").is_dir():
            return folder
    raise SpecError("`headrace test` works in a checkout of the project; clone it and run ./headrace test there")


def run_tests(arguments: list[str]) -> int:
    """ruff, mypy, then pytest with the arguments that are left. `--slow`: the tests marked slow, and nothing else."""
    slow = "--slow" in arguments
    rest = [argument for argument in arguments if argument != "--slow"]
    root = checkout()
    python = [sys.executable, "-m"]
    steps: list[tuple[str, list[str]]] = []
    if not slow and not rest:  # with arguments, somebody is after particular tests
        steps += [
            ("ruff check", [*python, "ruff", "check", "--no-cache", "."]),
            ("ruff format", [*python, "ruff", "format", "--no-cache", "--check", "."]),
            ("mypy", [*python, "mypy"]),
        ]
    marks = [] if "-m" in rest else ["-m", "slow" if slow else "not slow"]
    steps.append(("pytest", [*python, "pytest", *marks, *rest]))
    results = []
    for name, command in steps:
        print(f"== {name}", flush=True)
        began = time.monotonic()
        code = subprocess.run(command, cwd=root, check=False).returncode
        results.append((name, code, time.monotonic() - began))
    print("== summary")
    for name, code, seconds in results:
        print(f"{'passed' if code == 0 else 'FAILED':8}{name:14}{seconds:7.1f} s")
    return 0 if all(code == 0 for _, code, _ in results) else 1

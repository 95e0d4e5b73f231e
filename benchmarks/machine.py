"""The description of the machine in a result, and the folder of results."""

import functools
import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# Import this before torch: waiting OpenMP threads that spin compete for the cores of a shared machine.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

RESULTS = Path(__file__).parent / "results"


@functools.cache
def describe() -> dict[str, Any]:
    """Processor, cores, memory, versions, commit and the command line; the same for all results of a process."""
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": _commit(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("headrace", "torch", "transformers", "ray", "triton")},
    }


def save(name: str, result: dict[str, Any]) -> Path:
    """Appends `result` with the machine's description to results/NAME.jsonl, one line per run.

    A run that saves again, with more results, replaces its line.
    """
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    if lines and json.loads(lines[-1])["machine"] == describe():
        lines.pop()
    lines.append(json.dumps({"machine": describe(), **result}))
    path.write_text("\n".join(lines) + "\n")
    return path


def _commit() -> str:
    """Short hash of the checkout's commit, with '+' if files differ from it; HEADRACE_COMMIT where git is missing."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("HEADRACE_COMMIT", "")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None

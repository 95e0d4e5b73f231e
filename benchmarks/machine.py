"""What a result must say about where it was measured, and where results are kept."""

import json
import os
import platform
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

# Import this before torch: waiting OpenMP threads that spin fight over the cores of a shared machine.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

RESULTS = Path(__file__).parent / "results"


def describe() -> dict[str, Any]:
    """Processor, cores, memory, versions and the command line."""
    return {
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("headrace", "torch", "transformers", "ray", "triton")},
    }


def save(name: str, result: dict[str, Any]) -> Path:
    """Writes `result` with the machine's description to results/NAME.json."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}.json"
    path.write_text(json.dumps({"machine": describe(), **result}, indent=2) + "\n")
    return path


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

"""Prints which part of each package the last measured tests executed: `coverage json` as a short table."""

import json
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

COUNTS = ("covered_lines", "num_statements", "covered_branches", "num_branches")


def coverage_table(report: Mapping[str, Any]) -> list[str]:
    """Lines of a table: a header, a line per package, the total. `report`: the data of `coverage json`."""
    packages: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for path, measured in report["files"].items():
        package = next(part for part in PurePath(path).parts if part.startswith("headrace_"))
        for name in (package, "total"):
            packages[name].update({count: measured["summary"][count] for count in COUNTS})
    total = packages.pop("total")
    rows = [*sorted(packages.items()), ("total", total)]
    return [f"{'':20}{'lines':>9}{'branches':>11}"] + [
        f"{name:20}{_percent(found['covered_lines'], found['num_statements']):>9}"
        f"{_percent(found['covered_branches'], found['num_branches']):>11}"
        for name, found in rows
    ]


def _percent(covered: int, count: int) -> str:
    """Rounded down, so that 100.0 % means all."""
    return f"{covered * 1000 // count / 10:.1f} %" if count else "–"


def main() -> int:
    done = subprocess.run([sys.executable, "-m", "coverage", "json", "-q", "-o", "-"], stdout=subprocess.PIPE)
    if done.returncode != 0:
        return done.returncode
    print("\n".join(coverage_table(json.loads(done.stdout))))
    return 0


if __name__ == "__main__":
    sys.exit(main())

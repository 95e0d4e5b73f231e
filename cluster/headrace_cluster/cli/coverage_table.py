"""Prints which part of each package the last measured tests executed: slipcover's report as a short table."""

import json
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any


def coverage_table(report: Mapping[str, Any]) -> list[str]:
    """Lines of a table: a header, a line per package, the total. `report`: the data of `slipcover --json`."""
    packages: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for path, measured in report["files"].items():
        package = next(part for part in PurePath(path).parts if part.startswith("headrace_"))
        for name in (package, "total"):
            packages[name].update({count: number for count, number in measured["summary"].items() if "_" in count})
    total = packages.pop("total")
    rows = [*sorted(packages.items()), ("total", total)]
    return [f"{'':20}{'lines':>9}{'branches':>11}"] + [
        f"{name:20}{_percent(found, 'lines'):>9}{_percent(found, 'branches'):>11}" for name, found in rows
    ]


def _percent(found: Mapping[str, int], what: str) -> str:
    """Rounded down, so that 100.0 % means all."""
    covered, missing = found[f"covered_{what}"], found[f"missing_{what}"]
    return f"{covered * 1000 // (covered + missing) / 10:.1f} %" if covered + missing else "–"


def main() -> int:
    """The first argument is the file of the report."""
    try:
        report = json.loads(Path(sys.argv[1]).read_text())
    except (OSError, ValueError) as error:
        print(f"no report of coverage: {error}")
        return 1
    print("\n".join(coverage_table(report)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

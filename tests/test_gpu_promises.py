"""The table of what is proved about GPUs (docs/gpu.md) names tests and sections that exist."""

import re
from pathlib import Path

from gpu_bench.sections import CALLS, SECTIONS

ROOT = Path(__file__).parents[1]


def rows() -> list[list[str]]:
    lines = (ROOT / "docs" / "gpu.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines if line.startswith("| ")]
    return [row for row in cells if row[0] not in ("promise", "---")]


def test_each_promise_names_its_proofs() -> None:
    found = rows()
    assert len(found) > 20 and all(len(row) == 4 for row in found), found
    for promise, tests, only, section in found:
        paths = re.findall(r"`(tests/[^`]+)`", tests)
        assert tests == "–" or paths, promise
        assert all((ROOT / path).is_file() for path in paths), promise
        assert only and (section == "–" or set(re.findall(r"`([^`]+)`", section)) <= SECTIONS.keys()), promise
        assert paths or section != "–", f"nothing proves it: {promise}"


def test_each_section_proves_something() -> None:
    named = {name for row in rows() for name in re.findall(r"`([^`]+)`", row[3])}
    assert named == SECTIONS.keys()
    readme = (ROOT / "benchmarks" / "gpu_bench" / "README.md").read_text()
    assert all(f"`{call}`" in readme for call in CALLS)

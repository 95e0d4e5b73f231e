"""The table of line and branch coverage that CI prints."""

from typing import Any

from headrace_cluster.cli.coverage_table import coverage_table
from headrace_cluster.cli.test import Step, chosen_tests, full_check


def measured(lines: int, of_lines: int, branches: int, of_branches: int) -> dict[str, Any]:
    counts = {"covered_lines": lines, "missing_lines": of_lines - lines, "percent_covered": 0.5}
    return {"summary": counts | {"covered_branches": branches, "missing_branches": of_branches - branches}}


def test_lines_and_branches_are_added_per_package_and_in_total() -> None:
    files = {
        "worker/headrace_worker/core/engine.py": measured(90, 100, 10, 20),
        "worker/headrace_worker/device/memory.py": measured(10, 100, 0, 20),
        "proto/headrace_proto/stall.py": measured(20, 20, 0, 0),
        "router/headrace_router/server.py": measured(999, 1000, 2, 3),
    }
    assert coverage_table({"files": files}) == [
        "                        lines   branches",
        "headrace_proto        100.0 %          –",
        "headrace_router        99.9 %     66.6 %",
        "headrace_worker        50.0 %     25.0 %",
        "total                  91.7 %     27.9 %",
    ]


def test_one_missing_line_of_many_is_not_rounded_away() -> None:
    table = coverage_table({"files": {"proto/headrace_proto/stall.py": measured(9999, 10_000, 1, 1)}})
    assert table[-1].split() == ["total", "99.9", "%", "100.0", "%"]


def steps(groups: list[list[Step]]) -> list[Step]:
    return [step for group in groups for step in group]


def test_ci_measures_the_tests_that_run_side_by_side() -> None:
    groups = full_check(ci=True)
    assert [step.name for step in steps(groups) if "slipcover" in step.command] == ["pytest, side by side"]
    assert [step.name for step in groups[-1]] == ["coverage"]


def test_nothing_is_measured_elsewhere() -> None:
    for groups in (full_check(ci=False), chosen_tests(["tests"], ci=True, slow=False)):
        assert not [step for step in steps(groups) if "slipcover" in step.command or step.name == "coverage"]

"""docs/limits.md lists every limit of a router, with its default, and every measured case."""

import importlib
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import headrace_router.api
import headrace_router.core.account.account_table
import headrace_router.core.limits
import headrace_router.core.prefix.hash_scheme
import headrace_router.core.prefix.prompt_blocks
import headrace_router.core.prefix.replica_blocks
import headrace_router.event_loop
import headrace_router.text
from headrace_router.core.limits import Limits

ROOT = Path(__file__).parents[2]
TABLE = (ROOT / "docs" / "limits.md").read_text()


def _rows(heading: str) -> dict[str, list[str]]:
    """The rows of the table under a heading, by the name in their first cell."""
    section = TABLE.split(f"## {heading}\n")[1].split("\n## ")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]
    return {row[0].strip("`"): row[1:] for row in rows[2:]}


def _constants() -> dict[str, float]:
    """The numbers that modules of the APIs, of texts, of accounts and of KV blocks define, and those of all limits."""
    modules: list[ModuleType] = [
        headrace_router.event_loop,
        headrace_router.core.limits,
        headrace_router.core.account.account_table,
        headrace_router.core.prefix.hash_scheme,
        headrace_router.core.prefix.prompt_blocks,
        headrace_router.core.prefix.replica_blocks,
    ]
    for package in (headrace_router.api, headrace_router.text):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            modules.append(importlib.import_module(found.name))
    numbers: dict[str, float] = {}
    for module in modules:
        assert module.__file__ is not None
        defined = re.findall(r"^([A-Z][A-Z_]+) = \d", Path(module.__file__).read_text(), re.MULTILINE)
        for name in defined:
            numbers[f"{module.__name__.rpartition('.')[2]}.{name}"] = getattr(module, name)
    return numbers


def test_every_limit_is_in_the_table_with_its_default() -> None:
    rows = _rows("Settings")
    assert rows.keys() == Limits.model_fields.keys()
    for name, field in Limits.model_fields.items():
        shown = "none" if field.default is None else f"{field.default:,}"
        assert rows[name][0] == shown, name
        assert rows[name][1], name


def test_every_fixed_limit_is_in_the_table_with_its_value() -> None:
    assert {name: row[0] for name, row in _rows("Fixed").items()} == {
        name: f"{value:,}" for name, value in _constants().items()
    }


def test_every_measured_case_is_in_the_table() -> None:
    source = (ROOT / "benchmarks" / "limits.py").read_text()
    listed = source.split("    for case in (")[1].split(")")[0]
    cases = {name.replace("_", " ") for name in re.findall(r"\w+", listed)}
    measured = _rows("Measured")
    assert measured.keys() == cases
    named = set(re.findall(r"`(\w+)`", " ".join(row[0] for row in measured.values())))
    assert named <= Limits.model_fields.keys()
    for name, row in measured.items():
        assert all(re.fullmatch(r"[\d.]+", cell) for cell in row[1:4]), name

"""docs/reliability.md: it has every rule and invariant that a file cites, and names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("proto", "kernels", "worker", "router", "cluster", "tests")
PAGE = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
LINES = re.findall(r"^\| ([RI]\d+) \|.*\| (.*) \|$", PAGE, re.MULTILINE)
CITATION = re.compile(r"\((?:docs/reliability\.md\s+)?([RI]\d+(?:,\s+[RI]\d+)*)\)")


def test_every_line_names_a_test_or_what_is_missing() -> None:
    assert [name for name, _ in LINES] == [f"R{n}" for n in range(1, 25)] + [f"I{n}" for n in range(1, 26)]
    for name, shown in LINES:
        tests = re.findall(r"`(tests/[^`]+)`", shown)
        assert tests or "Not yet" in shown, name
        assert not [test for test in tests if not (ROOT / test).exists()], name


def test_what_files_cite_is_on_the_page() -> None:
    texts = [path.read_text(encoding="utf-8") for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    cited = {name for text in texts for group in CITATION.findall(text) for name in re.split(r",\s+", group)}
    assert cited and cited <= {name for name, _ in LINES}

"""docs/limits.md lists every setting of a router's limits, with its default."""

from pathlib import Path

from headrace_router.core.limits import Limits

TABLE = (Path(__file__).parents[2] / "docs" / "limits.md").read_text()


def test_every_limit_is_in_the_table_with_its_default() -> None:
    section = TABLE.split("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("|")][2:]
    rows = {name.strip().strip("`"): [cell.strip() for cell in cells] for name, *cells in lines}
    assert rows.keys() == Limits.model_fields.keys()
    for name, field in Limits.model_fields.items():
        shown = "none" if field.default is None else f"{field.default:,}"
        assert rows[name][0] == shown, name
        assert rows[name][1], name

"""The schema of the values and the table of the README are those of the cluster spec of today."""

import re
import runpy
import tomllib
from typing import Any

import yaml

from support.helm.chart import CHART, ROOT

GENERATOR: dict[str, Any] = runpy.run_path(str(ROOT / "helm" / "schema.py"))


def test_the_schema_and_the_table_of_the_readme_are_current() -> None:
    text = (CHART / "values.schema.json").read_text(encoding="utf-8")
    assert text == GENERATOR["schema_text"](), "run: python helm/schema.py"
    assert (CHART / "README.md").read_text(encoding="utf-8") == GENERATOR["readme"](), "run: python helm/schema.py"


def test_versions_are_those_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == chart["version"] == project["version"]
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    (ray,) = re.findall(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert values["rayVersion"] == ray

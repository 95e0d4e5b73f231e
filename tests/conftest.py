"""For all tests: a skip that names what to install is a failure where CI=1 (or true) is set."""

import os
import re
from collections.abc import Generator
from typing import Any

import pytest

# Before any test imports torch: the threads of several processes share few cores, and spinning ones block the others.
os.environ.setdefault("GOMP_SPINCOUNT", "2000")

_INSTALLABLE = re.compile(r"\b(apt-get install|apt install|pip install|npm (install|pack))\b")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: Any) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and os.environ.get("CI", "") not in ("", "0", "false"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if _INSTALLABLE.search(reason):
            report.outcome = "failed"
            report.longrepr = f"{item.nodeid}: {reason} (with CI=1 what can be installed must be there)"
    return report

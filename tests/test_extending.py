"""docs/extending.md: each diff applies to the tree as it is, touches as few places as the page states, and its test
passes in a copy of the tree with the diff applied, and fails without the change.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support.extensions import ROOT, Extension, extensions

PACKAGES = ("proto", "kernels", "worker", "router", "cluster")
COPIED = (*PACKAGES, "tests", "pyproject.toml", "headrace", "docs/api.md")
FRESHNESS = "tests/router/test_fields.py::test_the_page_is_current"
FAILED_TESTS = 1  # pytest's exit status; others mean that nothing was collected, or wrong arguments
# Files outside of tests, and other than generated ones, that an extension may touch.
MOST = {
    "A routing policy": 2,
    "A model family": 1,
    "A kernel": 6,
    "A sampling option": 4,
    "A setting": 1,
    "A metric": 1,
    "An endpoint": 2,
}


def test_every_extension_is_described() -> None:
    assert {extension.title for extension in extensions()} == set(MOST)


@pytest.mark.parametrize("extension", extensions(), ids=lambda extension: extension.title)
def test_the_diff_applies_and_its_test_passes(extension: Extension, tmp_path: Path) -> None:
    assert len(extension.places) == extension.stated <= MOST[extension.title], extension.places
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            shutil.copy(source, tmp_path / name)
    pytest_command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    test = [*pytest_command, *extension.command.split()]
    _run(["git", "apply", "--include=tests/*", "-"], tmp_path, extension.diff)
    _run(test, tmp_path, expected=FAILED_TESTS)
    _run(["git", "apply", "--exclude=tests/*", "-"], tmp_path, extension.diff)
    if "proto/" in extension.diff:
        _run(["sh", "proto/generate.sh"], tmp_path)
    _run(test, tmp_path)
    _run([*pytest_command, FRESHNESS], tmp_path)


def _run(command: list[str], folder: Path, text: str = "", *, expected: int = 0) -> None:
    """Runs a command, with this exit status, in the copy, whose packages come before the installed ones."""
    environ = os.environ | {
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(str(folder / package) for package in PACKAGES),
    }
    done = subprocess.run(command, cwd=folder, env=environ, input=text, capture_output=True, text=True, timeout=180)
    assert done.returncode == expected, f"{command}: {done.returncode}: {done.stdout[-4000:]}{done.stderr[-2000:]}"

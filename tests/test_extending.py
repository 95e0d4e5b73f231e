"""docs/extending.md: each diff applies to the tree as it is, touches as few places as the page states, and its test
passes in a copy of the tree with the diff applied, and fails without the change.
"""

import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("proto", "kernels", "worker", "router", "cluster")
COPIED = (*PACKAGES, "tests", "pyproject.toml", "headrace", "docs/api.md")
GENERATED = ("docs/api.md",)  # that a diff contains; the stubs are made by proto/generate.sh
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

_DIFF = re.compile(r"^```diff\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"^\./headrace test (.*)$", re.MULTILINE)


@dataclass(frozen=True)
class Extension:
    """One section of the page. command: the arguments of `./headrace test`."""

    title: str
    stated: int
    diff: str
    command: str

    @property
    def places(self) -> set[str]:
        """The files that it changes, apart from tests and generated ones; those of the contract are one."""
        files = set(re.findall(r"^diff --git a/(\S+)", self.diff, re.MULTILINE)).difference(GENERATED)
        return {"proto" if path.startswith("proto/") else path for path in files if not path.startswith("tests/")}


def extensions() -> list[Extension]:
    found = []
    for section in (ROOT / "docs/extending.md").read_text().split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        stated, diff, command = re.search(r"Places: (\d+)", text), _DIFF.search(text), _COMMAND.search(text)
        assert stated and diff and command, title
        found.append(Extension(title, int(stated[1]), diff[1], command[1]))
    return found


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

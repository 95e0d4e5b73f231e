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
COPIED = (*PACKAGES, "tests", "pyproject.toml", "headrace")
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
        """The files that it changes, tests aside; those of the contract are one."""
        files = re.findall(r"^diff --git a/(\S+)", self.diff, re.MULTILINE)
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
            shutil.copy(source, tmp_path / name)
    test = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *extension.command.split()]
    _run(["git", "apply", "--include=tests/*", "-"], tmp_path, extension.diff)
    _run(test, tmp_path, passes=False)
    _run(["git", "apply", "--exclude=tests/*", "-"], tmp_path, extension.diff)
    if "proto/" in extension.diff:
        _run(["sh", "proto/generate.sh"], tmp_path)
    _run(test, tmp_path)


def _run(command: list[str], folder: Path, text: str = "", *, passes: bool = True) -> None:
    """Runs a command in the copy, whose packages come before the installed ones."""
    environ = os.environ | {
        "PYTHON": sys.executable,
        "PYTHONPATH": os.pathsep.join(str(folder / package) for package in PACKAGES),
    }
    done = subprocess.run(command, cwd=folder, env=environ, input=text, capture_output=True, text=True, timeout=180)
    assert (done.returncode == 0) == passes, f"{command}: {done.stdout[-4000:]}{done.stderr[-2000:]}"

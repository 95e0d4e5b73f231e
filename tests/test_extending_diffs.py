"""docs/extending.md: each diff applies to the tree as it is. `test_extending.py` also runs its test."""

import subprocess

import pytest

from support.extensions import ROOT, Extension, extensions


@pytest.mark.parametrize("extension", extensions(), ids=lambda extension: extension.title)
def test_the_diff_applies(extension: Extension) -> None:
    command = ["git", "apply", "--check", "-"]
    done = subprocess.run(command, cwd=ROOT, input=extension.diff, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        pytest.fail(
            f"the diff of '{extension.title}' in docs/extending.md is stale:\n{done.stderr}"
            "Apply its change by hand to a copy of the tree, and replace the diff by `git diff -U1` of that copy, "
            "without its `index` lines and without the text after the second @@. Then run `./headrace test "
            "tests/test_extending.py`.",
            pytrace=False,
        )

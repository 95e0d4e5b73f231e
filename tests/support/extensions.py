"""The extensions of docs/extending.md: one per section."""

import re
from dataclasses import dataclass
from pathlib import Path

GENERATED = ("docs/api.md",)  # that a diff contains; the stubs are made by proto/generate.sh
ROOT = Path(__file__).parents[2]

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

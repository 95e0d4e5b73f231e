"""The fenced blocks of README.md and docs/, each with the mark that states how a test runs it.

A mark is an HTML comment on the line above the fence, invisible on the rendered page:

    <!-- test: KIND, OPTION=VALUE, … -->

kinds of a shell block
  session   the first line starts a server in the background; once it is ready the other lines run in order
  client    the block runs while a server started with `./headrace serve` is up
  starts    each line starts a server, which must become ready and answer, and is stopped
  plain     the block runs with no server
  no        it is not run; `why=` gives the reason
kinds of others: client (Python), spec (a cluster file in YAML), no

options: expect=REGEX (in the output of the block), why=REASON
"""

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[3]
RUNNABLE = {"sh", "bash", "console", "python", "yaml"}
KINDS = {"session", "client", "starts", "plain", "spec", "no"}

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_MARK = re.compile(r"<!-- test: (.*) -->\n\Z")


@dataclass(frozen=True)
class Block:
    """One fenced block. name: file and line. kind: '' without a mark."""

    name: str
    language: str
    text: str
    kind: str
    expect: str
    why: str

    @property
    def commands(self) -> list[str]:
        """The lines of a shell block that are commands, continued lines joined as the shell does."""
        joined = self.text.replace("\\\n", " ")
        return [line for line in joined.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def documents() -> list[Path]:
    """Every page whose blocks are checked."""
    return [ROOT / "README.md", ROOT / "examples/README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def blocks() -> list[Block]:
    """All blocks in a language that can be run, in the order of the pages."""
    return [block for path in documents() for block in _of(path)]


def _of(path: Path) -> list[Block]:
    page = path.read_text(encoding="utf-8")
    found = []
    for fence in _FENCE.finditer(page):
        if fence[1] not in RUNNABLE:
            continue
        mark = _MARK.search(page[: fence.start()])
        kind, _, rest = (mark[1] if mark else "").partition(",")
        options = dict(option.strip().partition("=")[::2] for option in rest.split(", ") if option.strip())
        line = page.count("\n", 0, fence.start()) + 1
        found.append(
            Block(
                name=f"{path.relative_to(ROOT)}:{line}",
                language=fence[1],
                text=fence[2],
                kind=kind.strip(),
                expect=options.get("expect", ""),
                why=options.get("why", ""),
            )
        )
    return found

"""A process with little memory that renders chat templates: what each one of stdin ends with, as JSON on stdout."""

import json
import resource
import subprocess
import sys
import tracemalloc
from pathlib import Path

from headrace_router.text import template_budget
from headrace_router.text.chat_template import ChatTemplate, ChatTemplateError
from support.child_environment import child_environment

MEMORY = 512 << 20  # bytes beyond those of the imported modules
SECONDS = 600  # far beyond what all templates of one call take


def probe(sources: list[str], budget: int = template_budget.ALL_TEXT) -> list[tuple[str, float]]:
    """(the error's sentence or the text, the most MiB that were allocated) of each template.

    budget: characters of all that one rendering makes.
    """
    command = [sys.executable, "-m", "support.router.template_probe", str(budget)]
    done = subprocess.run(
        command,
        input=json.dumps(sources),
        capture_output=True,
        text=True,
        env=child_environment(),
        check=True,
        timeout=SECONDS,
    )
    return [(ended, peak) for ended, peak in json.loads(done.stdout)]


def _ended(source: str) -> str:
    try:
        return ChatTemplate(source, {}).render([{"role": "user", "content": "x"}])[:200]
    except ChatTemplateError as error:
        return str(error)


def _main() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    template_budget.ALL_TEXT = int(sys.argv[1])
    tracemalloc.start()
    found = []
    for source in json.load(sys.stdin):
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        ended = _ended(source)
        found.append((ended, (tracemalloc.get_traced_memory()[1] - before) / 2**20))
    print(json.dumps(found))


if __name__ == "__main__":
    _main()

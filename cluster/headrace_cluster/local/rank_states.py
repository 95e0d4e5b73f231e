"""The stages of the ranks on this node, in files: what the readiness probe of a pod reads.

    python -m headrace_cluster.local.rank_states

It exits with 1, and a line for each rank, while a rank on this node does not serve; a node without ranks is ready.
"""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from headrace_cluster.errors import StateError
from headrace_cluster.local.processes import ProcessId
from headrace_cluster.local.state import home

READY = "ready"
FOLDER = "ranks"


class RankState:
    """The file of this process's rank. Where none can be written there is none: only a probe misses it."""

    def __init__(self, name: str) -> None:
        """name: of the rank, such as `smollm2-0.g1.r0`."""
        self._name = name
        self._path: Path | None = None
        with contextlib.suppress(OSError, StateError):
            folder = home() / FOLDER
            folder.mkdir(mode=0o700, exist_ok=True)
            for path, _ in _states(folder, alive=False):
                path.unlink(missing_ok=True)
            self._path = folder / f"{os.getpid()}.json"

    def write(self, stage: str) -> None:
        """From now on."""
        process = ProcessId.of(os.getpid())
        if self._path is None or process is None:
            return
        state = {"pid": process.pid, "started": process.started, "name": self._name, "stage": stage}
        with contextlib.suppress(OSError):
            new = self._path.with_suffix(".new")
            new.write_text(json.dumps(state))
            new.replace(self._path)


def waiting() -> list[str]:
    """'smollm2-0.g1.r0 is starting' for each live rank that does not serve."""
    states = [state for _, state in _states(home() / FOLDER, alive=True)]
    return [f"{state['name']} is {state['stage']}" for state in states if state["stage"] != READY]


def _states(folder: Path, *, alive: bool) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yields each state file and its content: of processes that live, or of processes that have ended."""
    for path in sorted(folder.glob("*.json")):
        try:
            state = json.loads(path.read_text())
            lives = ProcessId(state["pid"], state["started"]).alive
        except (OSError, ValueError, KeyError):
            continue
        if lives is alive:
            yield path, state


if __name__ == "__main__":
    found = waiting()
    print("\n".join(found) or "ready")
    sys.exit(bool(found))

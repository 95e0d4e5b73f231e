"""`headrace logs`: the log files of one run, merged by time; of the last run if no server runs."""

import heapq
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from headrace_cluster.cli.servers import ServerChoice, choose
from headrace_cluster.errors import NotRunningError
from headrace_cluster.launch.display import show_message
from headrace_cluster.local import state
from headrace_cluster.local.run_logs import in_use, runs, server_of
from headrace_cluster.local.state import describe
from headrace_cluster.program import program_name
from headrace_proto.log_file import previous

POLL_SECONDS = 0.25  # of files with --follow
LISTED_RUNS = 5  # at most, when none matches

# The first line of a record begins with its date, or with '{"timestamp": "' before it. Other lines continue a record.
_BEGIN = re.compile(r'(?:\{"timestamp": ")?(\d{4}-\d\d-\d\d[ T][\d:.]+)')


def find_run(choice: ServerChoice, part: str | None = None) -> Path:
    """The folder of the running server that matches by any name or port, else of the last run that does.

    With a part ('serve', 'router', a replica), runs that have it are preferred. Raises NotRunningError, and
    ServerChoiceError when several running servers match.
    """
    entries = [entry for entry in state.running() if entry.log_folder]
    if part is not None and not choice.given:
        entries = [entry for entry in entries if entry.starting or _files(Path(entry.log_folder), part)]
    server = choose(choice, entries)
    if server is not None:
        return Path(server.log_folder)
    without = [entry for entry in state.running() if not (entry.log_folder or entry.starting) and choice.matches(entry)]
    if without:
        raise NotRunningError(
            f"{describe(without[0])} keeps no log files (logs.files: off): see its stderr, and Ray's logs for its ranks"
        )
    kept = runs()
    matching = [run for run in kept if _matches(run, choice)]
    if not matching:
        raise NotRunningError(_no_match(choice, kept))
    with_part = [run for run in matching if part is None or _files(run, part)]
    return (with_part or matching)[-1]


def _matches(run: Path, choice: ServerChoice) -> bool:
    server = server_of(run)
    return choice.matches(server) if server is not None else not choice.given


def _no_match(choice: ServerChoice, kept: list[Path]) -> str:
    if not kept:
        return f"there are no logs; they come with the first `{program_name()} serve`"
    listed = "; ".join(_describe(run) for run in reversed(kept[-LISTED_RUNS:]))
    return f"there are no logs of a server with {choice.given}; the newest runs with logs: {listed}"


def _describe(run: Path) -> str:
    """'headrace (smollm2, HTTP 8000, admin 8002, process 4711), 20261122T020000Z'."""
    server = server_of(run)
    return f"{describe(server)}, {run.name.rpartition('-')[2]}" if server is not None else run.name


def log_files(run: Path, part: str | None) -> list[Path]:
    """The files of one part ('serve', 'router', a replica), or of all; fewer during a start.

    Raises NotRunningError when the part has no file.
    """
    found = _files(run, part)
    if not found and part is not None:
        names = ", ".join(dict.fromkeys(_part(file) for file in _files(run, None))) or "none yet"
        raise NotRunningError(f"{run} has no log of {part!r}; it has: {names}")
    return found


def print_logs(run: Path, part: str | None, lines: int, *, follow: bool) -> None:
    """Prints the last `lines` records; with `follow`, each new one while the server runs. Ctrl-C ends it."""
    out = sys.stdout
    try:
        tails = {file: _Tail(file) for file in log_files(run, part)}
        out.writelines(deque(merged([tail.read_all() for tail in tails.values()]), lines))
        out.flush()
        while follow:
            alive = in_use(run)  # before the files are read: they contain all that was written until then
            tails |= {file: _Tail(file) for file in _files(run, part) if file not in tails}
            out.writelines(merged([tail.read_new() for tail in tails.values()]))
            out.flush()
            if not alive:
                show_message("the server has ended")
                return
            time.sleep(POLL_SECONDS)
    except KeyboardInterrupt:
        return


def merged(files: list[str]) -> Iterator[str]:
    """Records of several files in the order of their times."""
    timed = heapq.merge(*(list(_records(text)) for text in files), key=lambda record: record[0])
    return (text for _, text in timed)


def _records(text: str) -> Iterator[tuple[str, str]]:
    """(time, lines) of each record; a time is never before that of the record above, so that files keep their order."""
    moment, lines = "", ""
    for line in text.splitlines(keepends=True):
        begin = _BEGIN.match(line)
        if begin is not None and lines:
            yield moment, lines
            lines = ""
        if begin is not None:
            moment = max(moment, begin[1])
        lines += line
    if lines:
        yield moment, lines


def _files(run: Path, part: str | None) -> list[Path]:
    return [file for file in sorted(run.glob("*.log")) if part in (None, _part(file), file.stem)]


def _part(file: Path) -> str:
    """'smollm2-0' of smollm2-0-rank1.log, 'router' of router-2.log, 'serve' of serve.log."""
    rank = re.fullmatch(r"(.+)-rank\d+|(router)-\d+", file.stem)
    return (rank[1] or rank[2]) if rank is not None else file.stem


class _Tail:
    """One growing file, read in whole lines; after a rotation, its successor is read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO = path.open("rb")
        self._rest = b""

    def read_all(self) -> str:
        """All content, including the rotated file before this one."""
        before = previous(self._path)
        return (before.read_text("utf-8", "replace") if before.exists() else "") + self.read_new()

    def read_new(self) -> str:
        """Whole lines since the last call."""
        data = self._rest + self._file.read()
        if self._path.exists() and self._path.stat().st_ino != _inode(self._file):
            data += self._file.read()  # written before the rotation
            self._file.close()
            self._file = self._path.open("rb")
            data += self._file.read()
        end = data.rfind(b"\n") + 1
        self._rest = data[end:]
        return data[:end].decode("utf-8", "replace")


def _inode(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_ino

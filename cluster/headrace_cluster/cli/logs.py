"""`headrace logs`: the log files of one run, merged by time; of the last run if no server runs."""

import heapq
import os
import re
import sys
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, BinaryIO

import typer

from headrace_base.logs import previous
from headrace_cluster.cli import options as o
from headrace_cluster.cli.servers import ServerChoice, choose
from headrace_cluster.errors import NotRunningError
from headrace_cluster.launch.display import show_message
from headrace_cluster.local import state
from headrace_cluster.local.run_logs import in_use, runs, server_of
from headrace_cluster.local.state import describe
from headrace_cluster.program import program_name

POLL_SECONDS = 0.25  # pause between two reads of the files with --follow

app = typer.Typer(rich_markup_mode=None)

# The first line of a record begins with its date, or with '{"timestamp": "' before it. Other lines continue a record.
_BEGIN = re.compile(r'(?:\{"timestamp": ")?(\d{4}-\d\d-\d\d[ T][\d:.]+)')


@app.command()
@o.takes_server()
def logs(
    choice: ServerChoice,
    part: Annotated[
        str | None,
        typer.Argument(metavar="[REPLICA]", help="Or router, controller, serve. [default: all, merged by time]"),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on with what comes, until Ctrl-C.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="Records to begin with.")] = 100,
    path: Annotated[bool, typer.Option("--path", help="Print the folder of the files, and exit.")] = False,
) -> None:
    """Show what the processes of a server log, or logged in its last run."""
    run = find_run(choice)
    if path:
        print(run)
    else:
        print_logs(run, part, lines, follow=follow)


def find_run(choice: ServerChoice) -> Path:
    """The folder of the running server that matches by any name or port, else of the last run that does.

    Raises NotRunningError, and ServerChoiceError when several running servers match.
    """
    server = choose(choice, state.running())
    if server is not None and server.log_folder:
        return Path(server.log_folder)
    if server is not None and not server.starting:
        raise NotRunningError(f"{describe(server)} has no log files (logs.files: off): see its stderr, and Ray's logs")
    for run in reversed(runs()):
        ended = server_of(run)
        if choice.matches(ended) if ended is not None else not choice.given:
            return run
    given = f" of a server with {choice.given}" if choice.given else ""
    raise NotRunningError(f"there are no logs{given}; each `{program_name()} serve` writes some")


def print_logs(run: Path, part: str | None, lines: int, *, follow: bool) -> None:
    """Prints the last `lines` records; with `follow`, each new one while the server runs. Ctrl-C ends it.

    part: 'serve', 'router', a replica; none = all. Raises NotRunningError when it has no file.
    """
    out = sys.stdout
    try:
        tails = {file: _Tail(file) for file in _files(run, part)}
        if part is not None and not tails:
            names = ", ".join(dict.fromkeys(_part(file) for file in _files(run, None))) or "none yet"
            raise NotRunningError(f"{run} has no log of {part!r}; it has: {names}")
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
        if self._path.exists() and self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino:
            data += self._file.read()  # written before the rotation
            self._file.close()
            self._file = self._path.open("rb")
            data += self._file.read()
        end = data.rfind(b"\n") + 1
        self._rest = data[end:]
        return data[:end].decode("utf-8", "replace")

"""The folder of one run of a server: a log file per process, Ray's logs in `ray`. The last five runs are kept.

HEADRACE_HOME/logs/<cluster>-<admin port>-<UTC time>, readable by its owner only. `server.json` in it is the server's
state without its key, by which the run is found after its end.
"""

import contextlib
import re
import shutil
from datetime import UTC, datetime
from pathlib import Path

from headrace_cluster.errors import StateError
from headrace_cluster.local import state
from headrace_cluster.local.state import ServeState

KEPT_RUNS = 5  # runs of a server whose folders are kept, the new run included
SERVER_FILE = "server.json"

_NAME = re.compile(r".+-\d+-20\d{6}T\d{6}Z")


def make_run_folder(cluster: str, admin_port: int, now: datetime | None = None) -> Path:
    """A new folder; older runs of the same server are removed. Raises StateError."""
    server = f"{cluster}-{admin_port}"
    path = logs_home() / f"{server}-{now or datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    try:
        logs_home().mkdir(mode=0o700, exist_ok=True)
        path.mkdir(mode=0o700)
    except OSError as error:
        raise StateError(
            f"the log folder {path} cannot be made: {error.strerror}; set HEADRACE_HOME to another"
        ) from error
    ended = [run for run in runs(server) if run != path and not in_use(run)]
    for run in ended[: max(0, len(ended) - (KEPT_RUNS - 1))]:
        shutil.rmtree(run, ignore_errors=True)
    return path


def logs_home() -> Path:
    """The folder of all runs."""
    return state.home() / "logs"


def runs(server: str = "") -> list[Path]:
    """Folders of runs, oldest first: of one server ('headrace-8002'), or of all."""
    found = [path for path in logs_home().glob(f"{server or '*'}-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: path.name[path.name.rindex("-20") :])


def in_use(run: Path) -> bool:
    """Whether the process of this run is alive."""
    server = server_of(run)
    return server is not None and server.process.alive


def server_of(run: Path) -> ServeState | None:
    """The state of the server of a run; None if it did not write it."""
    return state.read(run / SERVER_FILE)


def log_path(run: Path, part: str) -> Path:
    """The file of a process other than a rank: 'serve', 'controller', 'router', 'router 2'."""
    return run / f"{part.replace(' ', '-')}.log"


def rank_log_path(run: Path, replica_id: str, rank: int) -> Path:
    """The file of a rank; every generation of the replica appends to it."""
    return run / f"{replica_id}-rank{rank}.log"


def link_ray_logs(run: Path, temp_dir: Path) -> None:
    """Links to Ray's logs while Ray runs. `child_guard.keep_logs` replaces the link by the files at the end."""
    sessions = sorted(temp_dir.glob("session_2*/logs"))
    if sessions:
        with contextlib.suppress(OSError):  # a file system without links: the files are moved at the end
            (run / "ray").symlink_to(sessions[-1])

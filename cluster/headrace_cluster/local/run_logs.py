"""The folder of one run of a server: a log file per process, Ray's logs in `ray`. The last five runs are kept.

HEADRACE_HOME/logs/<cluster>-<admin port>-<UTC time>, readable by its owner only. During the run its `serve` has a lock
on the folder, which the kernel releases however that process ends. `server.json` in it has the names and ports that
identify the server after its end, and no keys.
"""

import contextlib
import fcntl
import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

from headrace_cluster.errors import StateError
from headrace_cluster.local import state
from headrace_cluster.local.state import ServeState
from headrace_proto.address import port_of

KEPT_RUNS = 5  # of a server, the new one included
RAY_FOLDER = "ray"
SERVER_FILE = "server.json"

_NAME = re.compile(r".+-\d+-20\d{6}T\d{6}Z(\.\d+)?")


@dataclass(frozen=True, slots=True)
class RunServer:
    """The names and ports of the server of a run."""

    cluster: str
    admin_port: int
    models: tuple[str, ...] = ()
    http_port: int = 0  # 0 = none, or unknown
    ports: tuple[int, ...] = ()  # all known ports, these two included

    @classmethod
    def of(cls, server: ServeState) -> Self:
        """The part of a server's state that may be kept: no keys."""
        admin, http = port_of(server.admin_url), port_of(server.http_url)
        return cls(server.cluster, admin, server.models, http, tuple(sorted(server.ports)))


class RunFolder:
    """A new folder, and the lock that marks it as in use. Older runs of the same server are removed."""

    def __init__(self, cluster: str, admin_port: int, now: datetime | None = None) -> None:
        """Raises StateError."""
        server = f"{cluster}-{admin_port}"
        name = f"{server}-{now or datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        try:
            logs_home().mkdir(mode=0o700, exist_ok=True)
            self.path = _make(name)
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            raise StateError(
                f"the log folder {logs_home() / name} cannot be made: {error.strerror}; set HEADRACE_HOME to another"
            ) from error
        ended = [run for run in runs(server) if run != self.path and not in_use(run)]
        for run in ended[: max(0, len(ended) - (KEPT_RUNS - 1))]:
            shutil.rmtree(run, ignore_errors=True)

    def close(self) -> None:
        """Marks the run as ended. Idempotent."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def logs_home() -> Path:
    """The folder of all runs."""
    return state.home() / "logs"


def runs(server: str = "") -> list[Path]:
    """Folders of runs, oldest first: of one server ('headrace-8002'), or of all."""
    found = [path for path in logs_home().glob(f"{server or '*'}-*") if _NAME.fullmatch(path.name) and path.is_dir()]
    return sorted(found, key=lambda path: path.name[path.name.rindex("-20") :])


def in_use(run: Path) -> bool:
    """Whether the `serve` of this run is alive."""
    try:
        descriptor = os.open(run, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def save_server(run: Path, server: ServeState) -> None:
    """Writes the names and ports of a run's server. Raises StateError."""
    state.write_private(run / SERVER_FILE, json.dumps(asdict(RunServer.of(server)), indent=1) + "\n")


def server_of(run: Path) -> RunServer:
    """The server of a run; without its file, the cluster and the admin port from the folder's name."""
    try:
        data = json.loads((run / SERVER_FILE).read_text(encoding="utf-8"))
        return RunServer(**(data | {name: tuple(data[name]) for name in ("models", "ports")}))
    except (OSError, ValueError, TypeError, KeyError):
        cluster, admin_port, _ = run.name.rsplit("-", 2)
        return RunServer(cluster, int(admin_port), ports=(int(admin_port),))


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
            (run / RAY_FOLDER).symlink_to(sessions[-1])


def _make(name: str) -> Path:
    for number in range(1, 100):  # servers on one port run one after the other; two in one second are rare
        path = logs_home() / (name if number == 1 else f"{name}.{number}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return path
    raise FileExistsError(17, "too many runs in this second")

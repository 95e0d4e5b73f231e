"""State of running servers for client commands: one 0600 file `serve-<pid>.json` per serve or controller.

The folder is HEADRACE_HOME (default ~/.headrace), readable by its owner only. A file whose process has ended counts as
absent, and is removed.
"""

import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace_base import private_file
from headrace_base.address import port_of
from headrace_base.private_file import folder_problem, read_private
from headrace_cluster.errors import StateError
from headrace_cluster.local.processes import ProcessId


@dataclass(frozen=True, slots=True)
class ServeState:
    """One running serve (or controller)."""

    pid: int
    started: int  # the process's start time, so that a reused pid does not match
    cluster: str
    admin_url: str
    admin_key: str
    admin_port: int
    http_url: str = ""
    grpc_address: str = ""
    models: tuple[str, ...] = ()
    control_address: str = ""
    secret_file: str = ""
    ray_dashboard: str = ""
    ray_token_file: str = ""
    log_folder: str = ""
    metrics: tuple[str, ...] = ()  # host:port of each router's own /metrics
    since: int = 0  # unix seconds of its start
    starting: bool = False  # its controller does not listen yet; ports are those of the spec, 0 = unknown
    shutdown_seconds: float = 5.0  # for requests in flight
    tls_cert: str = ""  # file of the certificate of its HTTP, gRPC and admin API; empty = they use no TLS
    detaches: bool = False  # a signal other than STOP_ALL ends this process only, not the cluster

    @property
    def process(self) -> ProcessId:
        return ProcessId(self.pid, self.started)

    @property
    def ports(self) -> set[int]:
        """Every known port of this server."""
        addresses = (self.http_url, self.grpc_address, self.admin_url, self.control_address, self.ray_dashboard)
        return {port for address in (*addresses, *self.metrics) if (port := port_of(address))}


def describe(server: ServeState) -> str:
    """'headrace (smollm2, HTTP 8000, admin 8002, process 4711)'."""
    ports = [("HTTP", port_of(server.http_url)), ("admin", port_of(server.admin_url))]
    parts = [*server.models, *(f"{name} {port}" for name, port in ports if port), f"process {server.pid}"]
    return f"{server.cluster} ({', '.join(parts)})"


def home() -> Path:
    """The folder, made if it is missing. Raises StateError."""
    path = Path(os.environ.get("HEADRACE_HOME", "").strip() or "~/.headrace").expanduser()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(13, "no permission to write")
        problem = folder_problem(path.stat(), os.geteuid()).format(path=path)
    except OSError as error:
        problem = str(error.strerror)
    if problem:
        raise StateError(
            f"the folder {path} for keys and process ids cannot be used: {problem}; or set HEADRACE_HOME to another"
        )
    return path


def write_private(path: Path, text: str) -> None:
    """Writes a file that only its owner can read, atomically. Raises StateError."""
    try:
        private_file.write_private(path, text.encode())
    except OSError as error:
        raise StateError(f"{path} cannot be written: {error.strerror}; is the disk full?") from error


def new_key() -> str:
    """A random key: 256 bits as text."""
    return secrets.token_urlsafe(32)


def path_of(state: ServeState) -> Path:
    """The path of the server's state file. Raises StateError."""
    return home() / f"serve-{state.pid}.json"


def save(state: ServeState, path: Path | None = None) -> Path:
    """Writes a state file, by default that of `path_of`. Raises StateError."""
    path = path_of(state) if path is None else path
    write_private(path, json.dumps(asdict(state), indent=1) + "\n")
    return path


def running() -> list[ServeState]:
    """All live serves of this user, by start time; files of processes that were killed are removed."""
    found = []
    for path in home().glob("serve-*.json"):
        state = read(path)
        if state is not None and state.process.alive:
            found.append(state)
        elif state is not None:
            path.unlink(missing_ok=True)
    return sorted(found, key=lambda state: (state.since, state.admin_port))


def read(path: Path) -> ServeState | None:
    """None if there is no file, or it was truncated by a full disk."""
    try:
        data: dict[str, Any] = json.loads(read_private(path, "the state file", follow_link=False))
        known = {name: data[name] for name in ServeState.__slots__ if name in data}
        lists = {name: tuple(known.get(name, ())) for name in ("models", "metrics")}
        return ServeState(**(known | lists))
    except (OSError, ValueError, TypeError):
        return None

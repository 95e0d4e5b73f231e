"""What client commands know about running servers: one 0600 file per serve, by admin port.

The folder is HEADRACE_HOME (default ~/.headrace), for its owner alone. A file whose process is gone counts as absent.
"""

import json
import os
import secrets
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headrace_cluster.errors import StateError
from headrace_cluster.processes import ProcessId


@dataclass(frozen=True, slots=True)
class ServeState:
    """One running serve (or controller)."""

    pid: int
    started: int  # the process's start time, so that a reused pid is not taken for it
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

    @property
    def process(self) -> ProcessId:
        return ProcessId(self.pid, self.started)


def home() -> Path:
    """The folder, made if it is missing. Raises StateError."""
    path = Path(os.environ.get("HEADRACE_HOME", "").strip() or "~/.headrace").expanduser()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(path, os.W_OK | os.X_OK):
            raise PermissionError(13, "no permission to write")
    except OSError as error:
        raise StateError(
            f"the folder {path} for keys and process ids cannot be used ({error.strerror}); "
            "set HEADRACE_HOME to another"
        ) from error
    return path


def write_private(path: Path, text: str) -> None:
    """Writes a file that only its owner can read, all of it or nothing. Raises StateError."""
    try:
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # 0600 from birth
        try:
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise StateError(f"{path} cannot be written: {error.strerror}; is the disk full?") from error


def new_key() -> str:
    """A random key: 256 bits as text."""
    return secrets.token_urlsafe(32)


def state_path(admin_port: int) -> Path:
    return home() / f"serve-{admin_port}.json"


def save(state: ServeState) -> Path:
    """Writes a serve's file. Raises StateError."""
    path = state_path(state.admin_port)
    write_private(path, json.dumps(asdict(state), indent=1) + "\n")
    return path


def load(admin_port: int) -> ServeState | None:
    """The serve that owns this admin port; None when there is none, or its process is gone."""
    state = last(admin_port)
    return state if state is not None and state.process.alive else None


def last(admin_port: int) -> ServeState | None:
    """The serve that owned this admin port last, alive or not: in a joined Ray its cluster may outlive it."""
    return _read(state_path(admin_port))


def running() -> list[ServeState]:
    """All serves of this user that are alive, by admin port."""
    states = [_read(path) for path in home().glob("serve-*.json")]
    alive = [state for state in states if state is not None and state.process.alive]
    return sorted(alive, key=lambda state: state.admin_port)


def _read(path: Path) -> ServeState | None:
    try:
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = {name: data[name] for name in ServeState.__slots__ if name in data}
        return ServeState(**(known | {"models": tuple(known.get("models", ()))}))
    except (OSError, ValueError, TypeError):
        return None  # absent, or cut off by a full disk: as good as no server

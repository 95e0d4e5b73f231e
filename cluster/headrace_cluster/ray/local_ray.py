"""The Ray of one `serve`: its processes on this machine, which end with it, and another GCS when it is lost."""

import os
import random
import tempfile
import time
from pathlib import Path

import structlog

from headrace_cluster.core.backoff import Backoff, Restarts
from headrace_cluster.errors import RayLostError, RayStartError
from headrace_cluster.local import state
from headrace_cluster.local.run_logs import link_ray_logs
from headrace_cluster.ray import private
from headrace_cluster.ray.connection import first_line, set_ray_environment
from headrace_cluster.spec.cluster_spec import ClusterSpec

LOCALHOST = "127.0.0.1"
BACKOFF = Backoff(1.0, 30.0)  # between starts of a GCS; after the first loss there is no pause
WINDOW_SECONDS = 120.0  # earlier losses do not count

log = structlog.get_logger(__name__)


def make_temp_dir() -> Path:
    """A private folder for one Ray. Short: the paths of its sockets have 107 bytes at most."""
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix=f"headrace-{os.getuid()}-", dir=base if len(base) < 24 else "/tmp"))


class LocalRay:
    """Runs as soon as it exists; create it in the main thread, with which its processes end. `stop` ends it."""

    def __init__(self, spec: ClusterSpec, folder: Path, logs: Path) -> None:
        """folder: its own. logs: the folder of this run. Raises RayStartError."""
        self.folder = folder
        self.token_file = folder / "token"
        state.write_private(self.token_file, state.new_key())
        _set_environment(self.token_file, folder)
        try:
            self._node = private.HeadNode(
                folder,
                LOCALHOST,
                object_store_memory=spec.ray.object_store_memory,
                include_dashboard=spec.ray.dashboard,
                dashboard_port=spec.ray.dashboard_port,
            )
        except Exception as error:  # Ray passes on any exception of its parts
            raise RayStartError(f"Ray did not start: {first_line(error)}; see ray/ in the log folder") from error
        self.address, self.dashboard = self._node.address, self._node.dashboard
        link_ray_logs(logs, folder)
        self._restarts = Restarts(BACKOFF, WINDOW_SECONDS, random.random)  # restarts of Ray's GCS
        self._restart_at: float | None = None

    def check(self) -> str:
        """Starts a lost GCS again; what was done, or an empty string. Raises RayLostError without its raylet."""
        if self.lost:
            raise RayLostError(
                "Ray's raylet ended, and with it every replica; start again, or run `controller` and `router` on a "
                "Ray that is supervised"
            )
        now = time.monotonic()
        if "gcs_server" not in self._node.dead_processes():
            return ""
        if self._restart_at is None:
            self._restart_at = now + self._restarts.lost(now)
        if now < self._restart_at:
            return ""
        self._restart_at = None
        try:
            self._node.restart_gcs()
        except Exception as error:
            log.error("the next GCS of Ray could not be started", exc_info=error)
            return f"Ray's gcs_server ended, and the next one did not start ({type(error).__name__}); trying again"
        return "Ray's gcs_server ended; another one was started, and requests were served meanwhile"

    @property
    def lost(self) -> bool:
        """Whether its raylet has ended, and with it every replica: no request in flight can finish."""
        return "raylet" in self._node.dead_processes()

    def stop(self) -> None:
        """Ends every process of it. Never raises."""
        self._node.stop()


def _set_environment(token_file: Path, folder: Path) -> None:
    """Sets the environment of Ray's processes and of our children; before Ray is imported, which reads some of it."""
    # An address in the environment is of another Ray. Keys are for this process alone, which has read them.
    theirs = ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_NAMESPACE", "RAY_JOB_CONFIG_JSON_ENV_VAR")
    for name in (*theirs, "HEADRACE_API_KEYS", "HEADRACE_METRICS_KEY"):
        os.environ.pop(name, None)
    os.environ.update(
        RAY_AUTH_MODE="token",
        RAY_AUTH_TOKEN_PATH=str(token_file),
        # Makes loopback the address of this node, to which all of Ray's sockets are then bound, including those of its
        # metrics, which need no token. By default every socket listens on all interfaces.
        RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0",
        RAY_gcs_storage="rocksdb",
        RAY_gcs_storage_path=str(folder / "gcs"),
        TMPDIR=str(folder),  # for Python's multiprocessing in the ranks, which leaves a folder when killed
    )
    # By default Ray's workers have the lowest priority (nice 15); ours serve requests.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # By default each of its log files grows to half a gigabyte.
    os.environ.setdefault("RAY_ROTATION_MAX_BYTES", str(16 << 20))
    os.environ.setdefault("RAY_ROTATION_BACKUP_COUNT", "1")
    set_ray_environment()

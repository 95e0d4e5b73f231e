"""The Ray of one `serve`: its processes on this machine, which end with it, and another GCS when it is lost."""

import os
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import structlog

from headrace_cluster.core.backoff import Backoff
from headrace_cluster.errors import RayLostError, RayStartError
from headrace_cluster.local import state
from headrace_cluster.local.cleanup import GuardedCleanup
from headrace_cluster.local.run_logs import RAY_FOLDER, link_ray_logs
from headrace_cluster.ray import private
from headrace_cluster.ray.connection import first_line, set_ray_environment
from headrace_cluster.spec.cluster_spec import ClusterSpec

LOCALHOST = "127.0.0.1"


def make_temp_dir() -> Path:
    """A private folder for one Ray. Short: the paths of its sockets have 107 bytes at most."""
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix=f"headrace-{os.getuid()}-", dir=base if len(base) < 24 else "/tmp"))


class LocalRay:
    """Runs as soon as it exists; create it in the main thread. `stop` ends it."""

    def __init__(self, spec: ClusterSpec, cleanup: GuardedCleanup, logs: Path) -> None:
        """logs: the folder of this run. Raises RayStartError."""
        token_file = state.home() / f"ray-token-{os.getpid()}"
        state.write_private(token_file, state.new_key())
        cleanup.remove_at_end(token_file)
        cleanup.keep_ray_logs(logs / RAY_FOLDER)
        self.token_file = str(token_file)
        _set_environment(token_file, cleanup.ray_folder)
        try:
            self._node = private.HeadNode(
                cleanup.ray_folder,
                LOCALHOST,
                object_store_memory=spec.ray.object_store_memory,
                include_dashboard=spec.ray.dashboard,
                dashboard_port=spec.ray.dashboard_port,
            )
        except Exception as error:  # Ray passes on any exception of its parts
            raise start_error(error) from error
        self.address, self.dashboard = self._node.address, self._node.dashboard
        link_ray_logs(logs, cleanup.ray_folder)
        self._gcs = GcsRestart(lambda: self._node.dead_processes() == {"gcs_server"}, self._node.restart_gcs)

    def check(self) -> list[str]:
        """What happened since the last call; starts a lost GCS again. Raises RayLostError without its raylet."""
        if self.lost:
            raise RayLostError(
                "Ray's raylet ended, and with it every replica; start again, or run `controller` and `router` on a "
                "Ray that is supervised"
            )
        message = self._gcs.poll()
        return [message] if message else []

    @property
    def lost(self) -> bool:
        """Whether its raylet has ended, and with it every replica: no request in flight can finish."""
        return "raylet" in self._node.dead_processes()

    def stop(self) -> None:
        """Ends every process of it. Never raises."""
        self._node.stop()


def start_error(error: Exception) -> RayStartError:
    """Of our own Ray; `serve` names the log folder with it."""
    timed_out = isinstance(error, TimeoutError) or "timed out" in str(error).lower()
    overloaded = "the machine may be overloaded: run it again, or " if timed_out else ""
    return RayStartError(f"Ray did not start: {first_line(error)}; {overloaded}see ray/ in the log folder")


def _set_environment(token_file: Path, folder: Path) -> None:
    """Of Ray's processes and of our children; before Ray is imported, which reads some of it."""
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


BACKOFF = Backoff(1.0, 30.0)  # between attempts; before the first attempt there is no pause
STABLE_SECONDS = 60.0  # one that ran so long starts the pauses from the beginning

log = structlog.get_logger(__name__)


class GcsRestart:
    """For the thread that started Ray: its processes end with that thread."""

    def __init__(
        self,
        is_dead: Callable[[], bool],
        start: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[], float] = random.random,
    ) -> None:
        """start: of another one; may raise."""
        self._is_dead = is_dead
        self._start = start
        self._clock = clock
        self._random = random
        self._failures = 0
        self._next = clock()

    def poll(self) -> str:
        """What was done, for the operator; empty: nothing."""
        now = self._clock()
        if now < self._next or not self._is_dead():
            return ""
        self._failures = 1 if now - self._next > STABLE_SECONDS else self._failures + 1
        self._next = now + BACKOFF.seconds(self._failures, self._random)
        try:
            self._start()
        except Exception as error:
            log.error("the next GCS of Ray could not be started", exc_info=error)
            return f"Ray's gcs_server ended, and the next one did not start ({type(error).__name__}); trying again"
        return "Ray's gcs_server ended; another one was started, and requests were served meanwhile"

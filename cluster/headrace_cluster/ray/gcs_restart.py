"""Another GCS for our own Ray when its GCS has ended; replicas serve meanwhile, and the state is on disk."""

import contextlib
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path

import structlog

from headrace_cluster.core.backoff import Backoff

POLL_SECONDS = 0.25
BACKOFF = Backoff(1.0, 30.0)  # between attempts; before the first attempt there is no pause
STABLE_SECONDS = 60.0  # one that ran so long starts the pauses from the beginning, and needs its reserve no more
RECONNECT_SECONDS = 86_400  # for which raylet, driver and actors wait for the next one; 60 by default, then they end
RESERVED_BYTES = 64 << 20  # on disk, for the next one: without space it ends as soon as it has started

log = structlog.get_logger(__name__)


def keep_state_in(ray_folder: Path) -> None:
    """Makes the next Ray of this process keep the state of its GCS in its folder, and its processes wait for a GCS."""
    reserve_space(ray_folder)
    os.environ.update(
        RAY_gcs_storage="rocksdb",
        RAY_gcs_storage_path=str(ray_folder / "gcs"),
        RAY_gcs_rpc_server_reconnect_timeout_s=str(RECONNECT_SECONDS),
    )


def reserve_space(ray_folder: Path) -> bool:
    """Whether the disk has space for the next GCS; without it what is left stays free."""
    path = _reserved_space(ray_folder)
    try:
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, RESERVED_BYTES)
    except OSError:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
        return False
    return True


class GcsRestart:
    """Decides when another GCS starts, and when space is reserved for the one after it. For one thread."""

    def __init__(
        self,
        is_dead: Callable[[], bool],
        start: Callable[[], None],
        reserve: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
        random: Callable[[], float] = random.random,
    ) -> None:
        """start: of another one, which gets the reserved space; may raise. reserve: space again, or false."""
        self._is_dead = is_dead
        self._start = start
        self._reserve = reserve
        self._reserve_at: float | None = None  # None while space is reserved
        self._clock = clock
        self._random = random
        self._failures = 0
        self._next = clock()

    def poll(self) -> str:
        """What was done, for the operator; empty: nothing."""
        now = self._clock()
        if not self._is_dead():
            if self._reserve_at is not None and now >= self._reserve_at:
                self._reserve_at = None if self._reserve() else now + STABLE_SECONDS
            return ""
        if now < self._next:
            return ""
        self._failures = 1 if now - self._next > STABLE_SECONDS else self._failures + 1
        self._next = now + BACKOFF.seconds(self._failures, self._random)
        self._reserve_at = now + STABLE_SECONDS
        try:
            self._start()
        except Exception as error:
            log.error("the next GCS of Ray could not be started", exc_info=error)
            return f"Ray's gcs_server ended, and the next one did not start ({type(error).__name__}); trying again"
        return "Ray's gcs_server ended; another one was started, and requests were served meanwhile"


class GcsWatch:
    """A thread of its own: a call of Ray in any other thread may wait for the GCS."""

    def __init__(self, restart: GcsRestart) -> None:
        self._restart = restart
        self._messages: deque[str] = deque()
        self._stopped = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gcs", daemon=True)
        self._thread.start()

    def messages(self) -> list[str]:
        """What happened since the last call."""
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def stop(self) -> None:
        """Before the GCS is ended on purpose. Idempotent."""
        self._stopped.set()
        self._ended.wait(2.0)

    def _run(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            if message := self._restart.poll():
                self._messages.append(message)
        self._ended.set()
        threading.Event().wait()  # a GCS ends with the thread that started it, and is needed for the end of Ray


def start_gcs(ray_folder: Path) -> None:
    """Starts the GCS of our own Ray again, with the same arguments and on the same port."""
    from ray._private import services, worker

    node = worker._global_node
    (dead,) = node.all_processes["gcs_server"]
    port = node.gcs_address.rpartition(":")[2]
    name = "--gcs_server_port="
    command = [f"{name}{port}" if argument.startswith(name) else argument for argument in dead.process.args]
    _reserved_space(ray_folder).unlink(missing_ok=True)
    node.all_processes["gcs_server"] = [
        services.start_ray_process(command, "gcs_server", fate_share=node.kernel_fate_share)
    ]


def _reserved_space(ray_folder: Path) -> Path:
    return ray_folder / "reserved-space"

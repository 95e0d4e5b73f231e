"""This process's connection to Ray: to a Ray of its own, which ends with it, or to a joined one."""

import contextlib
import os
import threading
import time
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from headrace_cluster.errors import RayLostError
from headrace_cluster.local import state
from headrace_cluster.local.cleanup import Cleanup, GuardedCleanup
from headrace_cluster.local.run_logs import RAY_FOLDER, link_ray_logs
from headrace_cluster.ray import local_ray
from headrace_cluster.ray.gcs_restart import GcsRestart, GcsWatch, reserve_space, start_gcs
from headrace_cluster.ray.local_ray import RayLink
from headrace_cluster.spec.cluster_spec import ClusterSpec

END_PAUSES = (0.2, 0.5, 0.0)  # seconds after each attempt to end the actors
JOINED_SECONDS = 2.0  # for a joined Ray to end our actors in a forced stop


class RayConnection:
    """Connected as soon as it exists; use it with `with`."""

    token_file = ""  # of our own Ray
    serves = False  # whether any replica of the cluster was up since this process started, or before
    stop_requested = False  # by an operator, for the whole cluster
    blocked = False  # a call in another thread has not returned, and this process ends: Ray is not shut down meanwhile

    def __init__(self, spec: ClusterSpec, link: RayLink) -> None:
        self.link = link
        self._cluster = spec.cluster

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.ends_in_order(error):
            local_ray.disconnect()

    def check(self) -> list[str]:
        """What happened to our own Ray since the last call. Raises RayLostError when its raylet has ended."""
        return []

    @property
    def destroys(self) -> bool:
        """Whether the end of this process ends the cluster; otherwise what serves goes on without it."""
        return self.link.owned or self.stop_requested or not self.serves

    def ends_in_order(self, error: BaseException | None) -> bool:
        """Whether calls of Ray end the actors, after `error` or, without one, after a requested stop."""
        return not self.blocked

    @property
    def alive(self) -> bool:
        """False once our own Ray has lost a process: no call of it can finish."""
        return True

    @property
    def lost_replicas(self) -> bool:
        """Whether our own Ray's raylet has ended, and with it every replica: no request in flight can finish."""
        return False

    def end_actors(self) -> None:
        """Ends every actor and placement group of the cluster by name, and its record. Never raises."""
        from headrace_cluster.ray import names as ray_names
        from headrace_cluster.ray.cluster_record import ClusterRecord

        for pause in END_PAUSES:  # Ray's GCS may not answer for a moment, or for ever
            with contextlib.suppress(Exception):
                ray_names.end_cluster(self._cluster)
                ClusterRecord(self._cluster).remove()
                return
            time.sleep(pause)

    def force_end(self) -> None:
        """Ends the actors at once, from any thread; the process must end right after it."""


class JoinedRay(RayConnection):
    """A Ray that others started: only what has our names ends."""

    def __init__(self, spec: ClusterSpec) -> None:
        """Raises RayStartError."""
        super().__init__(spec, local_ray.join(spec))

    def force_end(self) -> None:
        if not self.destroys:
            return
        closing = threading.Thread(target=self.end_actors, daemon=True)
        closing.start()
        closing.join(JOINED_SECONDS)


class OwnRay(RayConnection):
    """A Ray that starts on this machine and ends with this process. If it does not end in order, it is killed."""

    def __init__(self, spec: ClusterSpec, cleanup: GuardedCleanup, logs: Path) -> None:
        """logs: the folder of this run. Raises RayStartError."""
        token_file = state.home() / f"ray-token-{os.getpid()}"
        state.write_private(token_file, state.new_key())
        cleanup.remove_at_end(token_file)
        cleanup.keep_ray_logs(logs / RAY_FOLDER)
        super().__init__(spec, local_ray.start_own(spec, token_file, cleanup.ray_folder))
        link_ray_logs(logs, cleanup.ray_folder)
        self.token_file = str(token_file)
        start, reserve = partial(start_gcs, cleanup.ray_folder), partial(reserve_space, cleanup.ray_folder)
        self._gcs = GcsWatch(GcsRestart(lambda: local_ray.dead_processes() == ["gcs_server"], start, reserve))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gcs.stop()
        super().__exit__(kind, error, trace)

    def check(self) -> list[str]:
        if self.lost_replicas:
            raise RayLostError(
                "Ray's raylet ended, and with it every replica; start again, or join a Ray that is supervised "
                "(--ray-address)"
            )
        return self._gcs.messages()

    def force_end(self) -> None:
        self._gcs.stop()

    def ends_in_order(self, error: BaseException | None) -> bool:
        # After an interrupt of the start it may be partly up: a call of it may then wait for a minute.
        return not self.blocked and not isinstance(error, KeyboardInterrupt) and self.alive

    @property
    def alive(self) -> bool:
        return not local_ray.dead_processes()

    @property
    def lost_replicas(self) -> bool:
        return "raylet" in local_ray.dead_processes()


def open_cleanup(spec: ClusterSpec) -> Cleanup:
    """For the whole run, before anything else is started."""
    return GuardedCleanup(local_ray.make_temp_dir()) if spec.ray.address is None else Cleanup()


def connect(spec: ClusterSpec, cleanup: Cleanup, logs: Path) -> RayConnection:
    """Starts Ray, or joins the one at the spec's address; `cleanup` is that of `open_cleanup`. Raises RayStartError."""
    return OwnRay(spec, cleanup, logs) if isinstance(cleanup, GuardedCleanup) else JoinedRay(spec)

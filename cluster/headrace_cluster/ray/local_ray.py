"""Starts our own Ray on this machine, or joins a Ray by address; a Ray is never discovered automatically."""

import contextlib
import logging
import os
import socket
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_cluster.core import naming
from headrace_cluster.errors import OpenRayError, RayStartError
from headrace_cluster.ray.gcs_restart import keep_state_in
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_proto.address import port_of, split_address

GCS_SECONDS = 20.0  # as long as Ray's own client retries: head and server may be started together
GCS_RETRY_SECONDS = 0.5

LOCALHOST = "127.0.0.1"
_NEEDED = {"gcs_server", "raylet"}  # other processes, such as the dashboard, are optional
_connected = False  # Ray's client is one per process: from its first attempt until `disconnect`


@dataclass(frozen=True, slots=True)
class RayLink:
    """This process's connection to Ray."""

    owned: bool
    dashboard: str  # URL; empty without a dashboard
    address: str  # host:port of the GCS


def make_temp_dir() -> Path:
    """A private folder for one Ray. Short: the paths of its sockets have 107 bytes at most."""
    base = tempfile.gettempdir()
    return Path(tempfile.mkdtemp(prefix=f"headrace-{os.getuid()}-", dir=base if len(base) < 24 else "/tmp"))


def start_own(spec: ClusterSpec, token_file: Path, temp_dir: Path) -> RayLink:
    """Starts a Ray that ends with this process; call it in the main thread: Ray's processes end when it ends.

    token_file has the token that every socket of that Ray requires. Raises RayStartError.
    """
    global _connected
    # Set before Ray is imported, since the import reads some of these. An address in the environment is of another Ray.
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_NAMESPACE", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        os.environ.pop(name, None)
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token_file)
    # Makes loopback the address of this node, to which all of Ray's sockets are then bound, including those of its
    # metrics, which need no token. Read when Ray is imported; by default every socket listens on all interfaces.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    os.environ["TMPDIR"] = str(temp_dir)  # for Python's multiprocessing in the ranks, which leaves a folder when killed
    # By default Ray's workers have the lowest priority (nice 15); ours serve requests.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # By default each of its log files grows to half a gigabyte.
    os.environ.setdefault("RAY_ROTATION_MAX_BYTES", str(16 << 20))
    os.environ.setdefault("RAY_ROTATION_BACKUP_COUNT", "1")
    keep_state_in(temp_dir)
    _set_ray_environment()
    import ray

    _connected = True
    _disable_driver_hooks()
    _use_own_sessions()
    try:
        context = ray.init(
            address="local",
            namespace=naming.namespace(spec.cluster),
            object_store_memory=spec.ray.object_store_memory,
            include_dashboard=spec.ray.dashboard,
            dashboard_host=LOCALHOST,
            dashboard_port=spec.ray.dashboard_port,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _temp_dir=str(temp_dir),
        )
    except Exception as error:  # Ray passes on any exception of its parts
        raise start_error(error) from error
    return _link(context, owned=True)


def start_error(error: Exception) -> RayStartError:
    """The error of our own Ray's start; `serve` names the log folder with it."""
    timed_out = isinstance(error, TimeoutError) or "timed out" in str(error).lower()
    overloaded = "the machine may be overloaded: run it again, or " if timed_out else ""
    return RayStartError(f"Ray did not start: {_first_line(error)}; {overloaded}see ray/ in the log folder")


def await_gcs(address: str, seconds: float = GCS_SECONDS) -> None:
    """Waits until something listens at 'host:port', where a Ray may be starting; 'auto' is left to Ray.

    Ray itself would wait for minutes, and log to its own files only. Raises RayStartError.
    """
    if not port_of(address):
        return
    deadline = time.monotonic() + seconds
    while True:
        try:
            socket.create_connection(split_address(address), max(0.1, deadline - time.monotonic())).close()
            return
        except (OSError, ValueError, OverflowError) as error:  # ValueError: a name that is none
            is_final = isinstance(error, socket.gaierror) or not isinstance(error, OSError)
            if is_final or time.monotonic() + GCS_RETRY_SECONDS >= deadline:
                reason = getattr(error, "strerror", None) or str(error)
                raise RayStartError(
                    f"no Ray answers at {address} ({reason}); check --ray-address: host and port of the GCS, "
                    "6379 by default"
                ) from error
        time.sleep(GCS_RETRY_SECONDS)


def join(spec: ClusterSpec) -> RayLink:
    """Joins the Ray at `ray.address`; its token comes from Ray's own environment variables.

    Raises RayStartError, and OpenRayError if it needs no token.
    """
    global _connected
    address = spec.ray.address
    assert address is not None
    from headrace_cluster.ray.token_check import check_token

    await_gcs(address)
    if port_of(address) and not spec.ray.no_auth:  # before it gets our token
        check_token(address)
    _set_ray_environment()
    import ray

    _connected = True
    _disable_driver_hooks()
    try:
        context = ray.init(
            address=address,
            namespace=naming.namespace(spec.cluster),
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:
        disconnect()
        raise RayStartError(
            f"no Ray could be joined at {address}: {_first_line(error)}; check --ray-address, and that "
            "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH holds that cluster's token"
        ) from error
    link = _link(context, owned=False)
    if not spec.ray.no_auth:  # again: 'auto' has its address now, and a Ray that was silent before answers
        try:
            check_token(link.address)
        except OpenRayError:
            disconnect()
            raise
    return link


def disconnect() -> None:
    """Disconnects; our own Ray ends."""
    global _connected
    import ray

    with contextlib.suppress(Exception):
        ray.shutdown()
    _connected = False


def is_connected() -> bool:
    """Whether Ray has not ended in order: its exit handlers would wait for it, and log."""
    return _connected


def dead_processes() -> list[str]:
    """Of our own Ray: the required processes that have ended ('raylet', 'gcs_server')."""
    from ray._private import worker

    node = worker._global_node
    if node is None:
        return [*_NEEDED]
    return sorted({kind for kind, _ in node.dead_processes()} & _NEEDED)


def _set_ray_environment() -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # no statistics are sent
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Its handler replaces ours for SIGTERM, prints a stack and aborts the process three seconds later.
    os.environ["RAY_DISABLE_FAILURE_SIGNAL_HANDLER"] = "1"
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # this environment, not a new one per worker


def _disable_driver_hooks() -> None:
    """Disables two hooks that Ray installs in its driver."""
    from ray._private import utils, worker

    # It prints deaths of workers to stdout, in a paragraph; the controller logs a sentence instead.
    worker.print_to_stdstream = lambda *_args, **_kwargs: None
    # Its SIGTERM handler exits at once; `serve` stops in order.
    utils.set_sigterm_handler = lambda _handler: None


def _use_own_sessions() -> None:
    """Makes Ray start its processes in sessions of their own.

    A signal for the process group of `serve`, as from a closed terminal or `timeout`, would otherwise end them while
    requests in flight finish, and Ray's driver waits 60 s for a GCS that has ended.
    """
    from ray._private import services

    class SeparateProcess(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options, start_new_session=True)

    services.ConsolePopen = SeparateProcess


def _link(context: Any, *, owned: bool) -> RayLink:
    url = context.dashboard_url
    return RayLink(owned=owned, dashboard=f"http://{url}" if url else "", address=context.address_info["gcs_address"])


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")[:300]

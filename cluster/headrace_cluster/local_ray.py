"""Ray: one of our own on this machine, or one that runs already. Never one that was found by accident."""

import contextlib
import logging
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_cluster import naming
from headrace_cluster.errors import RayStartError
from headrace_cluster.spec import ClusterSpec

LOCALHOST = "127.0.0.1"


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
    """Starts a Ray that ends with this process; call it from the main thread, whose end ends Ray's processes.

    token_file holds the token that guards every socket of that Ray. Raises RayStartError.
    """
    # Set before Ray is imported, which reads some of these then. An address in the environment is somebody else's Ray.
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_NAMESPACE", "RAY_JOB_CONFIG_JSON_ENV_VAR"):
        os.environ.pop(name, None)
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(token_file)
    # By default Ray's workers give way to everybody else (nice 15); ours answer requests.
    os.environ.setdefault("RAY_worker_niceness", "0")
    _quiet()
    import ray

    _tame()
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
    except Exception as error:  # Ray raises whatever its parts do
        raise RayStartError(f"Ray did not start: {_first_line(error)}; its logs are in {temp_dir}") from error
    return _link(context, owned=True)


def join(spec: ClusterSpec) -> RayLink:
    """Joins the Ray at `ray.address`; its token comes from Ray's own environment variables. Raises RayStartError."""
    _quiet()
    import ray

    _tame()
    address = spec.ray.address
    try:
        context = ray.init(
            address=address,
            namespace=naming.namespace(spec.cluster),
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
    except Exception as error:
        raise RayStartError(
            f"no Ray could be joined at {address}: {_first_line(error)}; check --ray-address, and that "
            "RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH holds that cluster's token"
        ) from error
    return _link(context, owned=False)


def leave() -> None:
    """Disconnects; a Ray of our own ends."""
    import ray

    with contextlib.suppress(Exception):
        ray.shutdown()


def keep_logs(temp_dir: Path, destination: Path) -> bool:
    """Copies Ray's logs, our ranks' output among them, to where a user can read them after the end."""
    sessions = sorted(temp_dir.glob("session_2*/logs"))
    if not sessions:
        return False
    shutil.rmtree(destination, ignore_errors=True)
    try:
        shutil.copytree(sessions[-1], destination)
    except (OSError, shutil.Error):
        return False
    return True


def _quiet() -> None:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"  # nothing leaves this machine
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Its handler takes SIGTERM from ours, prints a stack and aborts the process three seconds later.
    os.environ["RAY_DISABLE_FAILURE_SIGNAL_HANDLER"] = "1"
    os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # this environment, not a new one per worker


def _tame() -> None:
    """Takes back two things that Ray does to its driver."""
    from ray._private import utils, worker

    # It prints deaths of workers to stdout, in a paragraph; the controller has a sentence for them.
    worker.print_to_stdstream = lambda *_args, **_kwargs: None
    # It takes SIGTERM and exits where the program is; the stop of `serve` is in order.
    utils.set_sigterm_handler = lambda _handler: None


def _link(context: Any, *, owned: bool) -> RayLink:
    url = context.dashboard_url
    return RayLink(owned=owned, dashboard=f"http://{url}" if url else "", address=context.address_info["gcs_address"])


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")[:300]

"""Everything of Ray that its public interface does not offer: what to look at when another release of Ray is taken."""

import contextlib
import subprocess
from pathlib import Path
from typing import Any

_NEEDED = {"gcs_server", "raylet"}  # other processes, such as the dashboard, are optional
_SPACE = b"headrace"


class HeadNode:
    """The processes of a Ray on this machine. This process is no driver of it: none of these calls waits for a GCS."""

    def __init__(self, folder: Path, host: str, **settings: Any) -> None:
        """Starts them; they end with the calling thread. settings: of `ray.init`."""
        from ray._private.node import Node
        from ray._private.parameter import RayParams

        _use_own_sessions()
        params = RayParams(temp_dir=str(folder), dashboard_host=host, **settings)
        self._node = Node(params, head=True, shutdown_at_exit=False, spawn_reaper=True, ray_init_cluster=True)

    @property
    def address(self) -> str:
        """host:port of the GCS."""
        return str(self._node.gcs_address)

    @property
    def dashboard(self) -> str:
        """URL; empty without a dashboard."""
        return f"http://{self._node.webui_url}" if self._node.webui_url else ""

    def dead_processes(self) -> set[str]:
        """The required ones that have ended: raylet, gcs_server."""
        return {kind for kind, _ in self._node.dead_processes()} & _NEEDED

    def restart_gcs(self) -> None:
        """Starts the GCS again, with the same arguments and on the same port."""
        from ray._private import services

        (dead,) = self._node.all_processes["gcs_server"]
        port, name = self.address.rpartition(":")[2], "--gcs_server_port="
        command = [f"{name}{port}" if argument.startswith(name) else argument for argument in dead.process.args]
        self._node.all_processes["gcs_server"] = [
            services.start_ray_process(command, "gcs_server", fate_share=self._node.kernel_fate_share)
        ]

    def stop(self) -> None:
        """Ends all processes. Never raises."""
        with contextlib.suppress(Exception):
            self._node.kill_all_processes(check_alive=False, allow_graceful=True)


def disable_driver_hooks() -> None:
    """Disables two hooks that Ray installs in a driver; call it before `ray.init`."""
    from ray._private import utils, worker

    # It prints deaths of workers to stdout, in a paragraph; the controller logs a sentence instead.
    worker.print_to_stdstream = lambda *_args, **_kwargs: None
    # Its SIGTERM handler exits at once; ours ends in order.
    utils.set_sigterm_handler = lambda _handler: None


def get_value(key: str) -> bytes | None:
    """A value in the key-value store of Ray's GCS. Blocks like the other calls; raises if the GCS does not answer."""
    from ray.experimental import internal_kv

    found: bytes | None = internal_kv._internal_kv_get(key.encode(), namespace=_SPACE)
    return found


def put_value(key: str, value: bytes) -> None:
    """Replaces a value."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_put(key.encode(), value, namespace=_SPACE)


def delete_value(key: str) -> None:
    """Removes a value, if it exists."""
    from ray.experimental import internal_kv

    internal_kv._internal_kv_del(key.encode(), namespace=_SPACE)


def draining_nodes() -> dict[str, int]:
    """Ids of the nodes that are being drained, and when they end: unix milliseconds, 0 = no deadline."""
    from ray._private.state import state

    found: dict[str, int] = state.get_draining_nodes()
    return found


def _use_own_sessions() -> None:
    """Makes Ray start its processes in sessions of their own.

    A signal for the process group of `serve`, as from a closed terminal or `timeout`, would otherwise end them while
    requests in flight finish.
    """
    from ray._private import services

    class SeparateProcess(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options, start_new_session=True)

    services.ConsolePopen = SeparateProcess

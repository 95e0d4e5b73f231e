"""What client commands know about this process: its state file, and the part that its log folder keeps."""

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace_cluster.core.view import RouterPlace
from headrace_cluster.launch.routers import reachable_address
from headrace_cluster.local import state
from headrace_cluster.local.cleanup import Cleanup
from headrace_cluster.local.ports import reachable
from headrace_cluster.local.processes import ProcessId
from headrace_cluster.local.run_logs import save_server
from headrace_cluster.local.state import ServeState
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_proto.address import host_port, port_of


class ServerRecord:
    """The state of this process, with what is known so far; each phase of the start adds its part.

    Before `save` it is in memory only. The methods that write raise StateError.
    """

    def __init__(self, spec: ClusterSpec, *, with_router: bool, detaches: bool = False) -> None:
        """Of a process that starts: addresses are those of the spec. detaches: the cluster goes on after its end."""
        process = ProcessId.of(os.getpid())
        assert process is not None
        routers = spec.routers
        self._spec = spec
        self._host = reachable(routers.host)
        self.state = ServeState(
            pid=process.pid,
            started=process.started,
            cluster=spec.cluster,
            admin_url=f"{spec.tls.scheme}://{host_port(spec.admin.host, spec.admin.port)}",
            admin_key=state.new_key(),
            admin_port=spec.admin.port,
            http_url=f"{spec.tls.scheme}://{host_port(self._host, routers.port)}" if with_router else "",
            grpc_address=host_port(self._host, routers.grpc_port) if with_router else "",
            models=tuple(model.name for model in spec.models),
            since=int(time.time()),
            starting=True,
            tls_cert=str(spec.tls.cert or ""),
            detaches=detaches,
        )

    def save(self, cleanup: Cleanup) -> None:
        """Writes the file of a process that starts."""
        state.remove_stale()
        cleanup.remove_at_end(state.save(self.state))

    def add_logs(self, folder: Path) -> None:
        """`headrace logs` finds the folder while the server starts."""
        self._update(log_folder=str(folder))

    def add_controller(
        self,
        control_address: str,
        admin_port: int,
        secret_file: Path,
        cleanup: Cleanup,
        dashboard: str,
        ray_token_file: str = "",
    ) -> None:
        """The ports of the controller are known: from now on the file is named after the admin port."""
        starting = state.path_of(self.state)
        path = self._update(
            admin_url=f"{self._spec.tls.scheme}://{host_port(self._spec.admin.host, admin_port)}",
            admin_port=admin_port,
            control_address=control_address,
            secret_file=str(secret_file),
            ray_dashboard=dashboard,
            ray_token_file=ray_token_file,
            starting=False,
            shutdown_seconds=self._spec.routers.shutdown_seconds,
        )
        cleanup.remove_at_end(path)
        starting.unlink(missing_ok=True)

    def add_routers(self, places: Sequence[RouterPlace]) -> None:
        """The first router's address, since routers share their ports, and the metrics address of each."""
        first = places[0]
        self._update(
            http_url=f"{self._spec.tls.scheme}://{host_port(self._host, port_of(first.http))}",
            grpc_address=host_port(self._host, port_of(first.grpc)) if first.grpc else "",
            metrics=tuple(reachable_address(place.metrics) for place in places),
        )

    def _update(self, **known: Any) -> Path:
        """Writes what changed; the log folder keeps the part without keys after the end. Returns the state file."""
        changed = replace(self.state, **known)
        path = state.path_of(changed)
        if changed != self.state:
            self.state = changed
            if changed.log_folder:
                save_server(Path(changed.log_folder), changed)
            state.save(changed)
        return path

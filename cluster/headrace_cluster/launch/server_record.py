"""What client commands know about this process: its state file, and a copy without keys in its log folder."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace_base.address import host_port
from headrace_cluster.local import state
from headrace_cluster.local.processes import ProcessId
from headrace_cluster.local.run_logs import SERVER_FILE
from headrace_cluster.local.state import ServeState
from headrace_cluster.local.tls_client import reachable
from headrace_cluster.spec.cluster_spec import ClusterSpec


class ServerRecord:
    """Each phase of the start adds what it knows. Before `save` it is in memory only. Writing raises StateError."""

    def __init__(self, spec: ClusterSpec, *, with_router: bool, detaches: bool = False) -> None:
        """Records a starting process, with the spec's addresses. detaches: the cluster goes on without the process."""
        process = ProcessId.of(os.getpid())
        assert process is not None
        self._spec = spec
        self.state = ServeState(
            pid=process.pid,
            started=process.started,
            cluster=spec.cluster,
            admin_key=state.new_key(),
            models=tuple(model.name for model in spec.models),
            since=int(time.time()),
            starting=True,
            tls_cert=str(spec.tls.cert or ""),
            detaches=detaches,
            shutdown_seconds=spec.routers.stop_seconds,
            **self._admin(spec.admin.port),
            **(self._public(spec.routers.port, spec.routers.grpc_port) if with_router else {}),
        )
        self.path = state.path_of(self.state)

    def save(self) -> None:
        """Writes the state file; the log folder keeps what is no key after the end."""
        state.save(self.state)
        if self.state.log_folder:
            state.save(replace(self.state, admin_key=""), Path(self.state.log_folder) / SERVER_FILE)

    def update(self, **known: Any) -> None:
        """Writes what changed."""
        changed = replace(self.state, **known)
        if changed != self.state:
            self.state = changed
            self.save()

    def add_admin(self, port: int) -> None:
        """The port of the admin API."""
        self.update(**self._admin(port))

    def add_routers(self, http_port: int, grpc_port: int) -> None:
        """The ports of the public APIs."""
        self.update(**self._public(http_port, grpc_port))

    def _admin(self, port: int) -> dict[str, Any]:
        url = f"{self._spec.tls.scheme}://{host_port(self._spec.admin.host, port)}"
        return {"admin_url": url, "admin_port": port}

    def _public(self, http_port: int, grpc_port: int) -> dict[str, Any]:
        host = reachable(self._spec.routers.host)
        url = f"{self._spec.tls.scheme}://{host_port(host, http_port)}"
        return {"http_url": url, "grpc_address": host_port(host, grpc_port)}

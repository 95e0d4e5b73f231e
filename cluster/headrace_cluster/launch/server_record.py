"""What client commands know about this process: its state file, and a copy without keys in its log folder."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace_cluster.local import state
from headrace_cluster.local.processes import ProcessId
from headrace_cluster.local.run_logs import SERVER_FILE
from headrace_cluster.local.state import ServeState
from headrace_cluster.local.tls_client import reachable
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_proto.address import host_port


class ServerRecord:
    """Each phase of the start adds what it knows. All methods raise StateError."""

    def __init__(self, spec: ClusterSpec, *, with_router: bool, detaches: bool = False) -> None:
        """Of a process that starts: addresses are those of the spec. detaches: the cluster goes on after its end."""
        process = ProcessId.of(os.getpid())
        assert process is not None
        self._spec = spec
        self.state = ServeState(
            pid=process.pid,
            started=process.started,
            cluster=spec.cluster,
            admin_url="",
            admin_key=state.new_key(),
            admin_port=0,
            models=tuple(model.name for model in spec.models),
            since=int(time.time()),
            starting=True,
            tls_cert=str(spec.tls.cert or ""),
            detaches=detaches,
            shutdown_seconds=spec.routers.shutdown_seconds,
        )
        self.path = state.save(self.state)
        self.add_admin(spec.admin.port)
        if with_router:
            self.add_routers(spec.routers.port, spec.routers.grpc_port)

    def add_admin(self, port: int) -> None:
        """The port of the admin API."""
        url = f"{self._spec.tls.scheme}://{host_port(self._spec.admin.host, port)}"
        self.update(admin_url=url, admin_port=port)

    def add_routers(self, http_port: int, grpc_port: int) -> None:
        """The ports of the public APIs."""
        host = reachable(self._spec.routers.host)
        url = f"{self._spec.tls.scheme}://{host_port(host, http_port)}"
        self.update(http_url=url, grpc_address=host_port(host, grpc_port))

    def update(self, **known: Any) -> None:
        """Writes what changed."""
        changed = replace(self.state, **known)
        if changed != self.state:
            self.state = changed
            state.save(changed)
            if changed.log_folder:  # it stays there after the end
                state.write(Path(changed.log_folder) / SERVER_FILE, replace(changed, admin_key=""))

"""The controller in its process: reconciles through Ray, gRPC for routers, HTTP for the command line."""

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import structlog
import uvicorn
from starlette.types import ASGIApp

from headrace_cluster.controller.admin import admin_app, admin_server, listen
from headrace_cluster.controller.certificates import ControllerCertificates
from headrace_cluster.controller.control_service import start_control_server
from headrace_cluster.controller.health import watch_health
from headrace_cluster.controller.members import Membership
from headrace_cluster.controller.operations import explain_operation, replica_operations
from headrace_cluster.controller.record_keeper import RecordKeeper
from headrace_cluster.controller.status import down_reason
from headrace_cluster.controller.supervisor import Supervisor
from headrace_cluster.core.rank_config import NODE_HOST
from headrace_cluster.core.snapshot import ControllerSnapshot
from headrace_cluster.core.view import UNWATCHED_SECONDS, ControllerArgs, Opened, ReplicaProgress, RouterPlace, View
from headrace_cluster.ray import names as ray_names
from headrace_cluster.ray.cluster_record import ClusterRecord
from headrace_cluster.ray.driver import RayDriver
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_proto.errors import ListenError
from headrace_proto.identity import Identity
from headrace_router.access.tls_files import TlsFiles

LISTEN_SECONDS = 3.0  # for the process of the last controller, which has the same ports, to end

log = structlog.get_logger(__name__)


class Controller:
    """Connects a Supervisor with a RayDriver and the two servers. `open`, then `close`. Of one event loop."""

    def __init__(
        self,
        args: ControllerArgs,
        spec: ClusterSpec,
        identity: Identity,
        certificates: ControllerCertificates,
        is_watched: Callable[[], bool],
    ) -> None:
        """certificates: of the identity. is_watched: whether a keeper polls this controller."""
        self._spec = spec
        self._identity = identity
        self._certificates = certificates
        self._is_watched = is_watched
        self._loopback = "127.0.0.1" if args.loopback else None
        self._membership = Membership()
        driver = RayDriver(
            spec,
            certificates.authority,
            host=self._loopback or NODE_HOST,
            replica_class=args.replica_class,
            log_folder=args.log_folder,
        )
        self._supervisor = Supervisor(spec, driver, self._membership, partial(watch_health, identity))
        self._servers = contextlib.AsyncExitStack()  # that listen
        self._tls = TlsFiles(spec.tls) if spec.tls.enabled else None
        self._admin_server: uvicorn.Server | None = None
        self._stop_requested = False
        self._stopping: asyncio.Task[None] | None = None
        self._record = ClusterRecord(spec.cluster)
        self._keeping: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[Any]] = []

    async def open(self) -> Opened:
        """Listens, adopts the builds of an earlier controller, starts the others. Raises HeadraceError."""
        import ray.util

        host = self._spec.control.host or self._loopback or str(ray.util.get_node_ip_address())
        admin = await _listen(self._spec.admin.host, self._spec.admin.port)
        grpc, port = await start_control_server(
            self._membership, self._identity, self._certificates.authority, host, self._spec.control.port
        )
        self._servers.push_async_callback(grpc.stop, grace=0.2)
        adopted = await self._supervisor.adopt(await asyncio.to_thread(self._record.snapshot))
        self._supervisor.start()
        keeper = RecordKeeper(self._supervisor, self._save)
        self._keeping = self._repeat("the record", keeper.run)
        # Routers renew theirs by themselves.
        self._repeat(
            "the renewal of certificates", partial(self._certificates.keep, self._supervisor.renew_certificates)
        )
        operations = replica_operations(self._supervisor, keeper.saved)
        operations.append(explain_operation(self._membership.explaining))
        app = admin_app(self._certificates.admin_key, self._status, self._request_stop, operations)
        if self._tls is not None:
            self._repeat("the watch over the TLS files", self._tls.watch)
        admin_port = int(admin.getsockname()[1])
        listening = [admin]
        self._repeat("the admin API", partial(self._serve_admin, app, admin_port, listening))
        self._servers.callback(self._end_admin)
        return Opened(
            control_host=host,
            control_port=port,
            admin_port=admin_port,
            pid=os.getpid(),
            adopted=adopted,
            outdated=sum(record.outdated for record in self._supervisor.reconciler.builds()),
        )

    def use_secrets(self, sealed: bytes) -> None:
        """The cluster's secrets have changed. sealed: ControllerSecrets."""
        self._certificates.replace(sealed)
        self._supervisor.renew_certificates()
        log.info("the cluster's secrets have changed: every member gets another certificate")

    def view(self) -> View:
        """What `serve` polls."""
        reconciler, overview = self._supervisor.reconciler, self._supervisor.overview
        status = overview.status()
        return View(
            ready=reconciler.ready,
            fatal=reconciler.fatal,
            unable=dict(reconciler.unable),
            problems=status["problems"],
            stop_requested=self._stop_requested,
            progress=[ReplicaProgress(key, p.stage, p.fraction) for key, p in overview.progress().items()],
            started=overview.started(),
            roles={record.replica_id: str(record.role) for record in reconciler.records.values()},
            routers=[RouterPlace(r.id, r.pid, r.http, r.grpc, r.metrics) for r in self._membership.routers.values()],
            failures={
                entry["id"]: reason
                for entry in status["replicas"]
                if (reason := down_reason(reconciler.records[entry["id"]], entry["note"]))
            },
            in_flight=overview.in_flight,
        )

    async def close(self) -> None:
        """Drains and ends every replica, then the servers."""
        if self._keeping is not None:
            self._keeping.cancel()
        await self._supervisor.stop()
        await self._servers.aclose()

    def _repeat(self, label: str, work: Callable[[], Awaitable[None]]) -> asyncio.Task[None]:
        """Runs it until this process ends; the status shows its failures."""
        task = asyncio.create_task(self._supervisor.retries.run(label, work))
        self._tasks.append(task)
        return task

    async def _serve_admin(self, app: ASGIApp, port: int, listening: list[socket.socket]) -> None:
        """listening: the first socket, which is taken from it: uvicorn closes it when it ends."""
        admin = listening.pop() if listening else await _listen(self._spec.admin.host, port)
        self._admin_server = admin_server(app, self._tls)
        try:
            await self._admin_server.serve(sockets=[admin])
        finally:
            admin.close()

    def _end_admin(self) -> None:
        if self._admin_server is not None:
            self._admin_server.should_exit = True

    async def _save(self, snapshot: ControllerSnapshot) -> None:
        await asyncio.to_thread(self._record.save_snapshot, snapshot)

    def _status(self) -> dict[str, Any]:
        return self._supervisor.status() | {"controller": {"pid": os.getpid()}}

    async def _request_stop(self) -> None:
        self._stop_requested = True
        if self._stopping is None or self._stopping.done():  # the keeper may have ended after an earlier request
            self._stopping = asyncio.create_task(self._stop_unwatched())

    async def _stop_unwatched(self) -> None:
        """Stops the cluster if the process that started it does not poll: normally that process stops it in order."""
        await asyncio.sleep(UNWATCHED_SECONDS)
        if not self._is_watched():
            await self.close()
            await asyncio.to_thread(self._record.remove)
            ray_names.end_cluster(self._spec.cluster)


async def _listen(host: str, port: int) -> socket.socket:
    """Raises ListenError when the port stays in use."""
    deadline = time.monotonic() + LISTEN_SECONDS
    while True:
        try:
            return listen(host, port)
        except ListenError:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(0.1)

"""The controller as a named, detached Ray actor on the head node: gRPC for routers, HTTP for the command line."""

import asyncio
import contextlib
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import structlog

from headrace_cluster import program
from headrace_cluster.controller.admin import admin_app, admin_server, listen
from headrace_cluster.controller.control_service import start_control_server
from headrace_cluster.controller.health import watch_health
from headrace_cluster.controller.members import Membership
from headrace_cluster.controller.operations import replica_operations
from headrace_cluster.controller.record_keeper import keep_record
from headrace_cluster.controller.status import down_reason
from headrace_cluster.controller.supervisor import Supervisor
from headrace_cluster.core.rank_config import NODE_HOST
from headrace_cluster.core.snapshot import ControllerSnapshot
from headrace_cluster.core.view import ControllerArgs, ControllerSecrets, Opened, ReplicaProgress, RouterPlace, View
from headrace_cluster.local.run_logs import log_path
from headrace_cluster.ray import names as ray_names
from headrace_cluster.ray.cluster_record import ClusterRecord
from headrace_cluster.ray.driver import RayDriver
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_proto.authority import ClusterAuthority
from headrace_proto.errors import HeadraceError
from headrace_proto.identity import Identity
from headrace_proto.logs import LogConfig, configure_logs
from headrace_proto.plane import Plane
from headrace_router.access.tls_files import TlsFiles

DUE_SECONDS = 600.0  # between two looks at the age of the certificates
UNWATCHED_SECONDS = 5.0  # after a stop request, without a poll from `serve`, the controller stops the cluster itself

log = structlog.get_logger(__name__)


class ControllerActor:
    """Connects a Supervisor with a RayDriver and the two servers. An async actor: one event loop."""

    def __init__(self, args: bytes) -> None:
        self._args = msgspec.msgpack.decode(args, type=ControllerArgs)
        os.environ[program.VARIABLE] = self._args.program
        self._spec = ClusterSpec.model_validate_json(self._args.spec)
        if self._args.log_folder:
            path = log_path(Path(self._args.log_folder), "controller")
            configure_logs(LogConfig("controller", path=str(path), format=self._spec.logs.format))
        self._loopback = "127.0.0.1" if self._args.loopback else None
        self._membership = Membership()
        self._identity = Identity()
        self._given: ControllerSecrets | None = None
        self._made: ClusterAuthority | None = None
        driver = RayDriver(
            self._spec,
            self._authority,
            host=self._loopback or NODE_HOST,
            replica_class=self._args.replica_class,
            log_folder=self._args.log_folder,
        )
        watch = partial(watch_health, self._identity)
        self._supervisor = Supervisor(self._spec, driver, self._membership, watch)
        self._servers = contextlib.AsyncExitStack()  # those that listen
        self._stop_requested = False
        self._polled_at = time.monotonic()
        self._opening = False
        self._record = ClusterRecord(self._spec.cluster)
        self._keeping: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[Any]] = []

    async def request(self) -> bytes:
        """The certificate request of this process: secrets are sealed for it."""
        return self._identity.request

    async def open(self, sealed: bytes) -> bytes:
        """Listens, adopts the builds of an earlier controller, starts the others; returns an encoded Opened.

        sealed: ControllerSecrets.
        """
        self._opening = True
        try:
            self._use(sealed)
            return msgspec.msgpack.encode(await self._open())
        except HeadraceError as error:
            return msgspec.msgpack.encode(Opened(error=str(error)))
        finally:
            self._opening, self._polled_at = False, time.monotonic()

    async def _open(self) -> Opened:
        import ray.util

        host = self._spec.control.host or self._loopback or str(ray.util.get_node_ip_address())
        admin = listen(self._spec.admin.host, self._spec.admin.port)
        grpc, port = await start_control_server(
            self._membership, self._identity, self._authority, host, self._spec.control.port
        )
        self._servers.push_async_callback(grpc.stop, grace=0.2)
        adopted = await self._supervisor.adopt(await asyncio.to_thread(self._record.snapshot))
        self._supervisor.start()
        self._keeping = asyncio.create_task(keep_record(self._supervisor, self._save))
        self._tasks.append(asyncio.create_task(self._keep_certificates()))
        operations = replica_operations(self._supervisor)
        tls = TlsFiles(self._spec.tls.without_clients()) if self._spec.tls.enabled else None
        server = admin_server(admin_app(self._secrets.admin_key, self._status, self._request_stop, operations), tls)
        if tls is not None:
            self._tasks.append(asyncio.create_task(tls.watch()))
        self._servers.callback(setattr, server, "should_exit", True)
        self._tasks.append(asyncio.create_task(server.serve(sockets=[admin])))
        admin_port = int(admin.getsockname()[1])
        return Opened(control_host=host, control_port=port, admin_port=admin_port, pid=os.getpid(), adopted=adopted)

    async def use_secrets(self, sealed: bytes) -> None:
        """The cluster's secrets have changed. sealed: ControllerSecrets."""
        self._use(sealed)
        self._supervisor.renew_certificates()
        log.info("the cluster's secrets have changed: every member gets another certificate")

    async def is_watched(self) -> bool:
        """Whether a keeper has polled it lately, or waits until it is open."""
        return self._opening or time.monotonic() - self._polled_at < UNWATCHED_SECONDS

    async def view(self) -> bytes:
        """An encoded View."""
        self._polled_at = time.monotonic()
        reconciler, overview = self._supervisor.reconciler, self._supervisor.overview
        status = overview.status()
        view = View(
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
        return msgspec.msgpack.encode(view)

    async def close(self) -> None:
        """Drains and ends every replica, then the servers."""
        if self._keeping is not None:
            self._keeping.cancel()
        await self._supervisor.stop()
        await self._servers.aclose()

    async def _save(self, snapshot: ControllerSnapshot) -> None:
        await asyncio.to_thread(self._record.save_snapshot, snapshot)

    async def _keep_certificates(self) -> None:
        while True:
            await asyncio.sleep(DUE_SECONDS)
            if self._identity.is_due(self._authority().fingerprints):
                self._certify_own()
                self._supervisor.renew_certificates()  # routers ask for theirs

    def _certify_own(self) -> None:
        own = self._authority().certify(self._identity.request, Plane.CONTROLLER, self._spec.cluster)
        self._identity.install(own)

    def _use(self, sealed: bytes) -> None:
        self._given = msgspec.msgpack.decode(self._identity.unseal(sealed), type=ControllerSecrets)
        self._made = ClusterAuthority(self._given.secrets)
        self._certify_own()

    @property
    def _secrets(self) -> ControllerSecrets:
        assert self._given is not None, "`open` comes first"
        return self._given

    def _authority(self) -> ClusterAuthority:
        assert self._made is not None, "`open` comes first"
        return self._made

    def _status(self) -> dict[str, Any]:
        return self._supervisor.status() | {"controller": {"pid": os.getpid()}}

    async def _request_stop(self) -> None:
        if not self._stop_requested:
            self._stop_requested = True
            self._tasks.append(asyncio.create_task(self._stop_unwatched()))

    async def _stop_unwatched(self) -> None:
        """Stops the cluster if the process that started it does not poll: normally that process stops it in order."""
        await asyncio.sleep(UNWATCHED_SECONDS)
        if time.monotonic() - self._polled_at > UNWATCHED_SECONDS:
            await self.close()
            await asyncio.to_thread(self._record.remove)
            ray_names.end_cluster(self._spec.cluster)

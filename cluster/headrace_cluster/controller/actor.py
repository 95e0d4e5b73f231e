"""The controller as a named, detached Ray actor on the head node: gRPC for routers, HTTP for the command line."""

import asyncio
import os
import time
from typing import Any

import msgspec

from headrace_cluster import ray_names
from headrace_cluster.controller.admin import admin_app, admin_server, listen
from headrace_cluster.controller.control_service import start_control_server
from headrace_cluster.controller.members import Membership
from headrace_cluster.controller.orders import replica_orders
from headrace_cluster.controller.ray_driver import RayDriver
from headrace_cluster.controller.status import trouble
from headrace_cluster.controller.supervisor import Supervisor
from headrace_cluster.controller.view import ControllerArgs, Opened, ReplicaProgress, RouterPlace, View
from headrace_cluster.rank_config import NODE_HOST
from headrace_cluster.spec import ClusterSpec
from headrace_proto.errors import HeadraceError

WATCHED_SECONDS = 5.0  # without a look from `serve`, a controller that is told to stop ends by itself


class ControllerActor:
    """Glue: a Supervisor with a RayDriver, and the two servers. An async actor: one event loop."""

    def __init__(self, args: bytes) -> None:
        self._args = msgspec.msgpack.decode(args, type=ControllerArgs)
        self._spec = ClusterSpec.model_validate_json(self._args.spec)
        self._stop_requested = False
        self._looked_at = time.monotonic()
        self._tasks: list[asyncio.Task[Any]] = []

    async def open(self) -> bytes:
        """Listens, adopts what an earlier controller left, and begins to build the rest; an encoded Opened."""
        import ray.util

        loopback = "127.0.0.1" if self._args.loopback else None
        host = self._spec.control.host or loopback or str(ray.util.get_node_ip_address())
        self._membership = Membership()
        try:
            admin = listen(self._spec.admin.host, self._spec.admin.port)
            self._grpc, port = await start_control_server(
                self._membership, self._args.secret, host, self._spec.control.port
            )
        except HeadraceError as error:
            return msgspec.msgpack.encode(Opened(error=str(error)))
        driver = RayDriver(
            self._spec,
            self._args.secret,
            host=loopback or NODE_HOST,
            replica_class=self._args.replica_class,
            environment=self._args.environment,
        )
        self._supervisor = Supervisor(self._spec, driver, self._membership, self._args.secret)
        await self._supervisor.adopt(self._args.memory)
        self._supervisor.start()
        supervisor = self._supervisor
        app = admin_app(self._args.admin_key, self._status, self._request_stop, replica_orders(supervisor))
        self._admin = admin_server(app)
        self._tasks.append(asyncio.create_task(self._admin.serve(sockets=[admin])))
        opened = Opened(control_host=host, control_port=port, admin_port=int(admin.getsockname()[1]), pid=os.getpid())
        return msgspec.msgpack.encode(opened)

    async def view(self) -> bytes:
        """An encoded View."""
        self._looked_at = time.monotonic()
        reconciler = self._supervisor.reconciler
        status = self._supervisor.status()
        view = View(
            ready=reconciler.ready,
            fatal=reconciler.fatal,
            stop_requested=self._stop_requested,
            replicas=len(reconciler.records),
            progress=[ReplicaProgress(key, p.stage, p.fraction) for key, p in self._supervisor.progress().items()],
            started=self._supervisor.started(),
            roles={record.replica_id: str(record.role) for record in reconciler.records.values()},
            routers=[RouterPlace(r.pid, r.http, r.grpc, r.metrics) for r in self._membership.routers.values()],
            memory=self._supervisor.memory(),
            failures={
                entry["id"]: why
                for entry in status["replicas"]
                if (why := trouble(reconciler.records[entry["id"]], entry["note"]))
            },
        )
        return msgspec.msgpack.encode(view)

    async def close(self) -> None:
        """Drains and ends every replica, then the servers."""
        await self._supervisor.stop()
        self._admin.should_exit = True
        await self._grpc.stop(grace=0.2)

    def _status(self) -> dict[str, Any]:
        return self._supervisor.status() | {"controller": {"pid": os.getpid()}}

    async def _request_stop(self) -> None:
        if not self._stop_requested:
            self._stop_requested = True
            self._tasks.append(asyncio.create_task(self._stop_unwatched()))

    async def _stop_unwatched(self) -> None:
        """Whoever started this cluster sees the request and stops in order; if nobody does, the controller stops."""
        await asyncio.sleep(WATCHED_SECONDS)
        if time.monotonic() - self._looked_at > WATCHED_SECONDS:
            await self.close()
            ray_names.end_cluster(self._spec.cluster)

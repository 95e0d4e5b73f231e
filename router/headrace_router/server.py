"""A router: everything it is made of, started and stopped in order."""

import asyncio
import contextlib
import os
import time
from collections.abc import Generator

import structlog
import uvicorn

from headrace_proto.control_pb2 import Member, RouterInfo
from headrace_router.admission import Admission
from headrace_router.auth import Authenticator, check_exposure
from headrace_router.card_cache import CardCache
from headrace_router.config import RouterConfig
from headrace_router.fleet import Fleet
from headrace_router.grpc_server import GrpcServer
from headrace_router.http.app import build_app
from headrace_router.http.protocol import bounded_protocol
from headrace_router.listen import bind_http, host_port
from headrace_router.membership import follow_controller, static_list
from headrace_router.policy import policy_by_name
from headrace_router.prepare import Preparer
from headrace_router.replica_link import ReplicaLink
from headrace_router.router_metrics import RouterMetrics
from headrace_router.services import Services
from headrace_router.tokenizer_pool import TokenizerPool

HOUSEKEEPING_SECONDS = 0.1
KEEP_ALIVE_CONNECTION_SECONDS = 75

log = structlog.get_logger("headrace.router")


class RouterServer:
    """`start`, then `stop`; in between `http_port` and `grpc_port` say where it listens."""

    def __init__(self, config: RouterConfig) -> None:
        """Raises ExposureError or KeysFileError before anything is opened."""
        check_exposure(config.host, config.auth)
        self.config = config
        self.http_port = 0
        self.grpc_port = 0
        secret = config.secret.get_secret_value()
        cards = CardCache()
        metrics = RouterMetrics()

        def make_link(member: Member) -> ReplicaLink:
            return ReplicaLink(
                member, router_id=config.router_id, secret=secret, cards=cards, stall_seconds=config.stall_seconds
            )

        disaggregate = config.disaggregation == "auto"
        fleet = Fleet(make_link, policy_by_name(config.policy), int(time.time()), disaggregate=disaggregate)
        metrics.watch(fleet)
        pool = TokenizerPool(config.limits)
        self.services = Services(
            config=config,
            auth=Authenticator(config.auth.load(), secret),
            fleet=fleet,
            metrics=metrics,
            admission=Admission(config.limits, metrics),
            pool=pool,
            preparer=Preparer(fleet, config.limits, pool),
        )
        self._grpc = GrpcServer(self.services)
        self._http: _QuietServer | None = None
        self._http_task: asyncio.Task[None] | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Listens on all ports, then looks for replicas. Raises ListenError."""
        config = self.config
        sock = bind_http(config.host, config.port)
        try:
            self.http_port = int(sock.getsockname()[1])
            if config.grpc_port is not None:
                self.grpc_port = await self._grpc.start(config.host, config.grpc_port)
        except BaseException:
            sock.close()
            raise
        options = uvicorn.Config(
            build_app(self.services),
            http=bounded_protocol(config.limits),
            loop="asyncio",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_CONNECTION_SECONDS,
            timeout_graceful_shutdown=max(1, round(config.shutdown_seconds)),
        )
        self._http = _QuietServer(options)
        self._http_task = asyncio.create_task(self._http.serve(sockets=[sock]))
        self.services.fleet.update(static_list(config.members))
        if config.controller is not None:
            secret = config.secret.get_secret_value()
            follow = follow_controller(config.controller, self.info(), secret, self.services.fleet)
            self._tasks.append(asyncio.create_task(follow))
        self._tasks.append(asyncio.create_task(self._keep_house()))
        log.info("router is listening", http=self.info().http, grpc=self.info().grpc)

    def info(self) -> RouterInfo:
        """What the controller tells others about this router."""
        host = self.config.host
        http = host_port(host, self.http_port)
        grpc = host_port(host, self.grpc_port) if self.grpc_port else ""
        return RouterInfo(
            id=self.config.router_id, pid=os.getpid(), node=self.config.node, http=http, grpc=grpc, metrics=http
        )

    async def stop(self) -> None:
        """Not ready at once, no new connections, requests in flight get their time, then all is closed."""
        self.services.admission.closed = True
        await self._grpc.tell_health()
        if self._http is not None:
            self._http.should_exit = True
        grace = self.config.shutdown_seconds
        waits = [self._grpc.stop(grace)]
        if self._http_task is not None:
            waits.append(_ended(self._http_task, grace + 2))
        await asyncio.gather(*waits)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.services.fleet.close()
        self.services.pool.close()
        log.info("router has stopped")

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_SECONDS)
            self.services.fleet.sweep()
            if self.config.rebalancing:
                self.services.fleet.rebalance(time.monotonic())
            await self._grpc.tell_health()


class _QuietServer(uvicorn.Server):
    """uvicorn without its signal handlers: the process decides when to stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


async def _ended(task: "asyncio.Task[None]", seconds: float) -> None:
    """Waits for a task to end; ends it when time is up."""
    done, _ = await asyncio.wait({task}, timeout=seconds)
    if not done:
        task.cancel()
        await asyncio.wait({task})

"""A router: everything it is made of, started and stopped in order."""

import asyncio
import contextlib
import os
import time

import structlog

from headrace_proto.control_pb2 import Member, RouterInfo
from headrace_router.admission import Admission
from headrace_router.auth import Authenticator, check_exposure
from headrace_router.card_cache import CardCache
from headrace_router.config import RouterConfig
from headrace_router.fleet import Fleet
from headrace_router.grpc_server import GrpcServer
from headrace_router.http.app import build_app, build_vital_app
from headrace_router.http.door import HttpDoor
from headrace_router.listen import bind_http, host_port
from headrace_router.membership import follow_controller, static_list
from headrace_router.policy import policy_by_name
from headrace_router.prepare import Preparer
from headrace_router.replica_link import ReplicaLink
from headrace_router.router_metrics import RouterMetrics
from headrace_router.services import Services
from headrace_router.tokenizer_pool import TokenizerPool

HOUSEKEEPING_SECONDS = 0.1
JOIN_SECONDS = (
    3.0  # for a router on shared ports to be ready; later than that it listens all the same, and says why not
)

log = structlog.get_logger("headrace.router")


class RouterServer:
    """`start`, then `stop`; in between `http_port` and `grpc_port` say where it listens."""

    def __init__(self, config: RouterConfig) -> None:
        """Raises ExposureError or KeysFileError before anything is opened."""
        check_exposure(config.host, config.auth)
        self.config = config
        self.http_port = 0
        self.grpc_port = 0
        self.metrics_port = 0  # of an address of its own; 0 = it has none
        secret = config.secret.get_secret_value()
        cards = CardCache()
        metrics = RouterMetrics()

        def make_link(member: Member) -> ReplicaLink:
            return ReplicaLink(
                member, router_id=config.router_id, secret=secret, cards=cards, stall_seconds=config.stall_seconds
            )

        policy = policy_by_name(config.policy)
        fleet = Fleet(make_link, policy, int(time.time()), disaggregation=config.disaggregation)
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
        self._http: HttpDoor | None = None
        self._vitals: HttpDoor | None = None
        self._was_ready = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Listens on all ports and looks for replicas. Raises ListenError.

        Ports that it shares with other routers come last: they answer, while this one does not know a replica yet.
        """
        config = self.config
        with contextlib.ExitStack() as failed:
            own = None
            if config.metrics_port is not None:
                own = failed.enter_context(bind_http(config.host, config.metrics_port))
                self.metrics_port = int(own.getsockname()[1])
            if config.share_port:
                self.http_port, self.grpc_port = config.port, config.grpc_port or 0
                self._look_for_replicas()
                await self._until_ready()
            public = failed.enter_context(bind_http(config.host, config.port, shared=config.share_port))
            if config.grpc_port is not None:
                self.grpc_port = await self._grpc.start(config.host, config.grpc_port)
            failed.pop_all()
        self._http = HttpDoor(build_app(self.services), public, config)
        self.http_port = self._http.port
        if own is not None:
            self._vitals = HttpDoor(build_vital_app(self.services), own, config)
        if not config.share_port:
            self._look_for_replicas()
        log.info("router is listening", http=self.info().http, grpc=self.info().grpc)

    def info(self) -> RouterInfo:
        """What the controller tells others about this router."""
        host = self.config.host
        http = host_port(host, self.http_port)
        grpc = host_port(host, self.grpc_port) if self.grpc_port else ""
        metrics = host_port(host, self.metrics_port) if self.metrics_port else http
        return RouterInfo(
            id=self.config.router_id, pid=os.getpid(), node=self.config.node, http=http, grpc=grpc, metrics=metrics
        )

    async def stop(self) -> None:
        """Not ready at once, no new connections, requests in flight get their time, then all is closed."""
        self.services.admission.closed = True
        await self._grpc.tell_health()
        waits = [self._grpc.stop(self.config.shutdown_seconds)]
        if self._http is not None:
            waits.append(self._http.stop())
        await asyncio.gather(*waits)
        if self._vitals is not None:
            await self._vitals.stop()  # last: it tells how the stop goes on
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.services.fleet.close()
        self.services.pool.close()
        log.info("router has stopped")

    def _look_for_replicas(self) -> None:
        config = self.config
        self.services.fleet.update(static_list(config.members))
        if config.controller is not None:
            secret = config.secret.get_secret_value()
            follow = follow_controller(config.controller, self.info(), secret, self.services.fleet)
            self._tasks.append(asyncio.create_task(follow))
        self._tasks.append(asyncio.create_task(self._keep_house()))

    async def _until_ready(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(JOIN_SECONDS):
                await self._was_ready.wait()

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(HOUSEKEEPING_SECONDS)
            try:
                self.services.fleet.sweep()
                if self.config.rebalancing:
                    self.services.fleet.rebalance(time.monotonic())
                if self.services.ready:
                    self._was_ready.set()
                await self._grpc.tell_health()
            except Exception:
                # A bug of ours must not end this for good: whoever waits on a stalled replica is moved from here.
                log.exception("housekeeping failed")

"""The router server: builds the router's parts, starts and stops them in order."""

import asyncio
import contextlib
import os
import random
import time

import structlog

from headrace_base.address import host_port
from headrace_base.cluster_member import ClusterMember, SecretFile
from headrace_proto.control_pb2 import RouterInfo
from headrace_router.access.auth import Authenticator, check_exposure, check_metrics_exposure
from headrace_router.access.key_files import KeyFiles
from headrace_router.access.tls_files import TlsFiles
from headrace_router.api.grpc.grpc_server import GrpcServer
from headrace_router.api.http.app import build_app, build_monitoring_app
from headrace_router.api.http.body import BodyReader
from headrace_router.api.http.http_server import HttpServer
from headrace_router.api.listen import bind_http
from headrace_router.api.services import Services, WorkSlices
from headrace_router.config import RouterConfig
from headrace_router.core.account import AccountTable
from headrace_router.core.cache_miss import Visits
from headrace_router.core.fleet import Fleet
from headrace_router.core.policy import POLICIES
from headrace_router.core.prefix_index import PrefixIndex
from headrace_router.dispatch.admission import Admission
from headrace_router.dispatch.prepare import Preparer
from headrace_router.dispatch.router_metrics import MeasuredPlacement, RouterMetrics, placement_report
from headrace_router.dispatch.running_request import Turns
from headrace_router.event_loop import exempt_from_collection
from headrace_router.replicas.card_cache import CardCache
from headrace_router.replicas.membership import static_list, watch_controller
from headrace_router.replicas.replica_link import ReplicaLinks
from headrace_router.text.tokenizer_pool import TokenizerPool

MAINTENANCE_SECONDS = 0.1
EXPIRING_TURNS = 20  # turns of the event loop that expire attempts, in each maintenance
EXEMPTED_AGAIN = 1.25  # times as many connected replicas as when these were last exempted from garbage collections
LAST_REQUEST_SECONDS = 1.0  # that connections to shared ports stay open without a request
FLUSH_SECONDS = 0.5  # for clients to read the end of their answers
# For a router on shared ports to be ready: until then others get its share of the connections. After that it listens in
# any case, and reports why it is not ready.
JOIN_SECONDS = 30.0

log = structlog.get_logger("headrace.router")


class RouterServer:
    """`start`, then `stop`; in between `http_port` and `grpc_port` are the ports that it listens on."""

    def __init__(self, config: RouterConfig) -> None:
        """Raises a HeadraceError, of keys, exposure, the secret or TLS files, before anything is opened."""
        check_exposure(config.host, config.auth)
        self._metrics_host = config.metrics_host or config.host
        if config.metrics_port is not None:
            check_metrics_exposure(self._metrics_host, config.auth, no_auth=config.metrics_no_auth)
        self.config = config
        self.http_port = 0
        self.grpc_port = 0
        self.metrics_port = 0  # port of the separate address for metrics; 0 = the router has none
        self._secret_file = SecretFile(config.secret_file)
        self._member = ClusterMember(self._secret_file.secret, config.internal_tls)
        metrics = RouterMetrics()
        self._keys = KeyFiles(config.auth)

        policy = POLICIES[config.policy]()
        index = PrefixIndex(config.prefix_index_blocks) if policy.uses_cache else None
        self._links = ReplicaLinks(
            router_id=config.router_id,
            member=self._member,
            cards=CardCache(),
            stall_seconds=config.stall_seconds,
            index=index,
        )
        fleet = Fleet(self._links.open, int(time.time()), clock=time.monotonic, jitter=random.random, index=index)
        placement = MeasuredPlacement(
            metrics, fleet, policy, clock=time.monotonic, disaggregation=config.disaggregation
        )
        metrics.add_fleet(fleet)
        pool = TokenizerPool(config.limits)
        self.services = Services(
            config=config,
            auth=Authenticator(self._keys.current, self._secret_file.secret.derive("tenant salts")),
            fleet=fleet,
            metrics=metrics,
            admission=Admission(config.limits, metrics),
            pool=pool,
            placement=placement,
            preparer=Preparer(
                fleet, placement.schemes, config.limits, pool, strips_volatile=config.volatile_blocks == "strip"
            ),
            bodies=BodyReader(config.limits, pool),
            slices=WorkSlices(),
            turns=Turns(),
            accounts=AccountTable(),
            visits=Visits(lambda holder: any(replica.build == holder for replica in fleet.replicas)),
        )
        if index is not None:
            index.on_drop = self.services.visits.dropped
        self._tls = TlsFiles(config.tls) if config.tls.enabled else None
        self._grpc = GrpcServer(self.services, self._tls)
        self._http: HttpServer | None = None
        self._monitoring: HttpServer | None = None
        self._was_ready = asyncio.Event()
        self._hurried = asyncio.Event()  # requests end now
        self._described = 0  # replicas, at the last maintenance
        self._exempted = 16  # replicas; those of a small cluster take little time
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Listens on all ports and connects to replicas. Raises ListenError.

        Ports that are shared with other routers come last: the others answer while this one has no replica yet. Its own
        address for metrics and health is served meanwhile.
        """
        config = self.config
        async with contextlib.AsyncExitStack() as failed:
            if config.metrics_port is not None:
                own = failed.enter_context(bind_http(self._metrics_host, config.metrics_port, flag="--metrics-port"))
                tls = None if self._tls is None else self._tls.monitoring_context
                self._monitoring = HttpServer(build_monitoring_app(self.services), own, config.limits, tls)
                self.metrics_port = self._monitoring.port
                failed.push_async_callback(self._monitoring.stop, 0.0)
            if config.share_port:
                self.http_port, self.grpc_port = config.port, config.grpc_port or 0
                self._connect_to_replicas()
                await self._until_ready()
            public = failed.enter_context(bind_http(config.host, config.port, shared=config.share_port))
            if config.grpc_port is not None:
                self.grpc_port = await self._grpc.start(config.host, config.grpc_port)
            failed.pop_all()
        tls = None if self._tls is None else self._tls.context
        self._http = HttpServer(build_app(self.services), public, config.limits, tls)
        self.http_port = self._http.port
        if not config.share_port:
            self._connect_to_replicas()
        self._tasks.append(asyncio.create_task(self._keys.watch(self.services.auth.use)))
        self._tasks.append(asyncio.create_task(self._watch_secret()))
        if self._tls is not None:
            self._tasks.append(asyncio.create_task(self._tls.watch()))
        log.info("router is listening", http=self.info().http, grpc=self.info().grpc)

    def info(self) -> RouterInfo:
        """What the controller publishes about this router."""
        host = self.config.host
        scheme = "https://" if self.config.tls.enabled else ""
        http = scheme + host_port(host, self.http_port)
        grpc = host_port(host, self.grpc_port) if self.grpc_port else ""
        metrics = scheme + host_port(self._metrics_host, self.metrics_port) if self.metrics_port else http
        return RouterInfo(
            id=self.config.router_id, pid=os.getpid(), node=self.config.node, http=http, grpc=grpc, metrics=metrics
        )

    async def serve_until(self, stopping: asyncio.Event) -> None:
        """Serves until the event is set, then stops."""
        await stopping.wait()
        await self.stop()

    def begin_stop(self) -> None:
        """Not ready from now on. New requests are refused with an error until `stop` closes the ports.

        With `leave_seconds` they are served for that long, and each connection is closed after its next answer. Then,
        and on shared ports at once, this router gives up its ports: others get the next connections, and what comes on
        connections that are open is served.
        """
        if self._leaves:
            self.services.admission.leave()
        else:
            self.services.admission.close()
        self._was_ready.set()  # `start` may wait for it

    @property
    def _leaves(self) -> bool:
        """Whether others get the next requests when this router stops."""
        return self.config.share_port or self.config.leave_seconds > 0

    def end_requests(self) -> None:
        """Ends requests in flight with an error now, instead of after `shutdown_seconds`."""
        self._hurried.set()
        self.services.admission.end_all()

    async def stop(self) -> None:
        """Requests in flight get `shutdown_seconds`, then an error with the reason; then everything is closed."""
        self.begin_stop()
        self._grpc.update_health()
        if self.config.leave_seconds:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.config.leave_seconds):
                    await self._hurried.wait()
        if self._leaves:
            if self._http is not None:
                await self._http.stop_listening()
            stopping = asyncio.create_task(self._grpc.stop(self.config.shutdown_seconds))  # no further calls
            self._tasks.append(stopping)
        else:
            self.services.admission.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.config.shutdown_seconds):
                if self._leaves and self._http is not None:  # a client may be sending its next request
                    await self._http.quiet(LAST_REQUEST_SECONDS)
                await self.services.admission.drained()
        self.end_requests()
        waits = [self._grpc.stop(FLUSH_SECONDS)]
        if self._http is not None:
            waits.append(self._http.stop(FLUSH_SECONDS))
        await asyncio.gather(*waits)
        if self._monitoring is not None:
            await self._monitoring.stop(FLUSH_SECONDS)  # last: it reports the progress of the stop
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.services.fleet.close()
        await self._links.drain()
        self.services.pool.close()
        log.info("router has stopped")

    def _connect_to_replicas(self) -> None:
        config = self.config
        self.services.fleet.update(static_list(config.members))
        if config.controller is not None:
            services = self.services
            watch = watch_controller(
                config.controller,
                self.info(),
                self._member,
                services.fleet,
                services.accounts,
                lambda: placement_report(services.fleet, services.metrics, config.policy),
            )
            self._tasks.append(asyncio.create_task(watch))
        self._tasks.append(asyncio.create_task(self._maintain()))

    async def _watch_secret(self) -> None:
        await self._secret_file.watch(lambda: log.info("the secret file has changed"), log.warning)

    async def _until_ready(self) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(JOIN_SECONDS):
                await self._was_ready.wait()

    def _exempt_replicas(self) -> None:
        """From garbage collections, once most have connected: each has hundreds of objects."""
        described = sum(replica.facts is not None for replica in self.services.fleet.replicas)
        if described == self._described and described > EXEMPTED_AGAIN * self._exempted:
            self._exempted = described
            exempt_from_collection(collect=False)
        self._described = described

    async def _maintain(self) -> None:
        while True:
            await asyncio.sleep(MAINTENANCE_SECONDS)
            try:
                self.services.fleet.maintain()
                self.services.visits.stamp(time.monotonic())
                self._exempt_replicas()
                await asyncio.sleep(0)
                for _ in range(EXPIRING_TURNS):  # many attempts may have ended at once
                    if not self.services.fleet.expire():
                        break
                    await asyncio.sleep(0)
                if self.config.rebalancing:
                    self.services.fleet.rebalance(time.monotonic())
                if self.services.ready:
                    self._was_ready.set()
                self._grpc.update_health()
            except Exception:
                # A bug of ours must not end this loop: it moves requests away from stalled replicas.
                log.exception("maintenance failed")

"""A router whose member list comes from a simulated controller, and its connection to it (`replicas/membership.py`)."""

import asyncio
from math import inf
from typing import TYPE_CHECKING, cast

from headrace_base.cluster_member import WATCH_REPLY_SECONDS
from headrace_cluster.core.naming import ReplicaName
from headrace_proto import control_pb2 as control
from headrace_router.core.errors import ApiError
from headrace_router.replicas.membership import FIRST_BACKOFF, LAST_BACKOFF, REPORT_SECONDS
from support.simulation.sim_request import ClientRequest, SimRequest, State
from support.simulation.sim_router import SimRouter
from support.simulation.world import Fifo, Keepalive

if TYPE_CHECKING:
    from support.simulation.managed_cluster import ManagedCluster
    from support.simulation.sim_controller import SimController

PATIENCE = 60.0  # of production


class ControlLink:
    """Reconnects until its router ends; meanwhile the last list stays in use."""

    def __init__(self, router: "ManagedRouter") -> None:
        self._router = router
        self._world = router.world
        self._controller: SimController | None = None
        self._watch: asyncio.Task[None] | None = None
        self.connected_since = inf  # without a cut of the direction of reports
        self._backoff = FIRST_BACKOFF
        self._cluster = router.managed
        self._keepalive = Keepalive(self._cluster.network, self._world, "controller", router.name, WATCH_REPLY_SECONDS)
        self._connect()
        self._report()

    def disconnected_from(self, controller: "SimController") -> None:
        """The controller's process, or the connection, has ended."""
        if self._controller is controller:
            self._world.at(self._world.delay(), lambda: self._lost(controller), self._router)

    def close(self) -> None:
        """The router's process ends: the controller detects it."""
        controller, watch = self._controller, self._watch
        self._controller, self.connected_since = None, inf
        if controller is not None and watch is not None:
            self._world.at(self._world.delay(), lambda: self._cancel(controller, watch), controller)

    def _connect(self) -> None:
        cluster, router = self._cluster, self._router
        controller = cluster.controller
        if (
            controller is None
            or not (controller.alive and controller.listening)
            or controller.frozen
            or not cluster.network.connected(router.name, controller.name)
        ):
            self._retry()
            return
        self._controller = controller
        lists = Fifo(self._world, router, lambda item: self._received(controller, item))
        info = control.RouterInfo(id=router.name, metrics=f"{router.name}:1")
        self._watch = controller.watch(info, lists)

    def _received(self, controller: "SimController", item: object) -> None:
        if self._controller is controller:
            self._backoff = FIRST_BACKOFF
            self._router.update(cast(control.MemberList, item))

    def _report(self) -> None:
        """Also ends a connection whose other end has not answered for long, as the controller's server does."""
        self._world.at(REPORT_SECONDS / self._router.rate, self._report, self._router)
        controller, network = self._controller, self._cluster.network
        if controller is None:
            return
        if self._keepalive.expired():
            self.close()
            self._retry()
            return
        if network.open_at(self._router.name, controller.name) > self._world.now or controller.frozen:
            self.connected_since = inf
            return
        self.connected_since = min(self.connected_since, self._world.now)
        report = self._router.fleet.report(self._router.name)
        self._world.at(self._world.delay(), lambda: controller.report(report), controller)

    def _lost(self, controller: "SimController") -> None:
        if self._controller is controller:
            self._controller, self.connected_since = None, inf
            self._retry()

    def _retry(self) -> None:
        pause = self._backoff * self._world.random.uniform(0.5, 1.5)
        self._backoff = min(2 * self._backoff, LAST_BACKOFF)
        self._world.at(pause, self._connect, self._router)

    def _cancel(self, controller: "SimController", watch: "asyncio.Task[None]") -> None:
        with controller.loop.entered():
            watch.cancel()


class ManagedRouter(SimRouter):
    """Ends with the process that started it; its clients lose their connections then."""

    def __init__(self, cluster: "ManagedCluster", name: str, rate: float) -> None:
        super().__init__(cluster, 0.0, name, PATIENCE, rate)
        self.managed = cluster
        self.heard_since: dict[ReplicaName, float] = {}  # builds that it receives from
        self.control = ControlLink(self)
        self.begin()

    def arrive(self, spec: ClientRequest) -> None:
        """The revision is that of the replicas that new requests use; without one the request is rejected."""
        try:
            request = SimRequest(self, spec, self.fleet.card("m"))
        except ApiError as error:
            request = SimRequest(self, spec, "")
            self.requests.append(request)
            request.ended(None, error)
            return
        self.requests.append(request)
        request.run.begin()

    def update(self, members: control.MemberList) -> None:
        self.managed.checks.listed(self, members)
        super().update(members)

    def placed(self, state: State) -> None:
        self.managed.checks.placed(self, state.address)

    def maintain(self) -> None:
        super().maintain()
        heard = {ReplicaName(*state.build) for state in self.fleet.replicas if state.heard}
        now = self.world.now
        self.heard_since = {name: self.heard_since.get(name, now) for name in sorted(heard)}
        self.managed.checks.ready(self)
        self.managed.checks.freed()

    def kill(self) -> None:
        """At once; replicas and controller detect it."""
        self.alive = False
        self.control.close()
        for stream in self.streams:
            stream.disconnect()
        for request in self.requests:
            if not request.outcome:
                request.connection_lost()

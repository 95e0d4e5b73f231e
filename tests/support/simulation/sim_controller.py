"""A controller's process, the health messages that it receives, and the process that starts it again."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import msgspec

from headrace_base.cluster_member import WATCH_REPLY_SECONDS
from headrace_base.errors import HeadraceError
from headrace_cluster.controller.control_loop import ControlLoop
from headrace_cluster.controller.control_service import ControlService
from headrace_cluster.controller.members import Membership
from headrace_cluster.controller.operations import Operation, replica_operations
from headrace_cluster.core.backoff import Restarts
from headrace_cluster.core.words import Words
from headrace_cluster.launch.child_process import BACKOFF, WINDOW_SECONDS
from headrace_cluster.launch.controller_process import START_SECONDS, VIEW_SECONDS
from headrace_cluster.launch.serve import WATCH_SECONDS
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_cluster.spec.process_specs import HealthSpec
from headrace_proto import control_pb2 as control
from headrace_proto import replica_pb2 as pb
from support.simulation.sim_driver import SimDriver
from support.simulation.sim_ray import SECRETS, SimRayError
from support.simulation.sim_replica import SimReplica
from support.simulation.virtual_loop import VirtualLoop
from support.simulation.world import Fifo, Keepalive

if TYPE_CHECKING:
    from support.simulation.managed_cluster import ManagedCluster

RECORD = "words"


class HealthStream:
    """From its opening to its end."""

    def __init__(
        self,
        controller: "SimController",
        replica: SimReplica,
        interval: float,
        on_health: Callable[[pb.ReplicaHealth], None],
    ) -> None:
        self.ended = asyncio.Event()
        self._controller = controller
        self._replica = replica
        self._interval = interval
        self._on_health = on_health
        self._world = replica.world
        self._fifo = Fifo(self._world, controller, self._received)
        self._open = True
        network = controller.cluster.network
        self._keepalive = Keepalive(network, self._world, replica.address, controller.name, WATCH_REPLY_SECONDS)
        replica.health_streams.append(self)
        self._send()

    def disconnect(self) -> None:
        """The replica's process has ended."""
        self._open = False
        self._world.at(self._world.delay(), self._end, self._controller)

    def _send(self) -> None:
        if not self._open or not self._controller.alive:
            return
        network, now = self._controller.cluster.network, self._world.now
        names = self._replica.address, self._controller.name
        if self._keepalive.expired():
            self._open = False
            seen_in = max(0.0, network.open_at(*names) - now) + self._world.delay()
            self._world.at(seen_in, self._end, self._controller)
            return
        self._fifo.held_until = network.open_at(*names)
        self._fifo.put(self._replica.health())
        self._world.at(self._interval, self._send, self._replica)

    def _received(self, item: object) -> None:
        with self._controller.loop.entered():
            self._on_health(cast(pb.ReplicaHealth, item))

    def _end(self) -> None:
        with self._controller.loop.entered():
            self.ended.set()


class SimController:
    """Owns its events. `open` it once; `kill` loses everything but what the record and the ranks hold."""

    def __init__(self, cluster: "ManagedCluster", spec: ClusterSpec, rate: float) -> None:
        """rate: seconds of its clock per second."""
        self.alive = True
        self.frozen_until = 0.0
        self.name = "controller"
        self.spec = spec
        self.cluster = cluster
        self.listening = False
        self.acts = False  # it has the lease
        self.loop = VirtualLoop(cluster.world, self, rate)  # type: ignore[abstract]
        self._opening: asyncio.Task[None] | None = None
        self._operations: dict[str, Operation] = {}
        with self.loop.entered():
            self._membership = Membership(self.loop.time)
            self.service = ControlService(self._membership)
            self._driver = SimDriver(self)
            self.words = Words()
            self.control = ControlLoop(
                spec,
                self.words,
                self._driver,
                self._membership,
                self._watch_health,
                lambda: SECRETS,
                self._save,
                self.loop.time,
                cluster.world.random.random,
            )
        self.planner = self.control.planner

    @property
    def frozen(self) -> bool:
        return self.frozen_until > self.cluster.world.now

    def open(self) -> None:
        """Begins to listen, to adopt and to reconcile."""
        with self.loop.entered():
            self._opening = asyncio.create_task(self._open())

    @property
    def opened(self) -> bool:
        """Whether `open` has ended. Raises its error."""
        if self._opening is None or not self._opening.done():
            return False
        self._opening.result()
        return True

    @property
    def answers(self) -> bool:
        """Whether operators' calls arrive."""
        return self.alive and not self.frozen and self.acts

    async def _open(self) -> None:
        """As `Controller.open`."""
        self.listening = True
        self.words.update(await self._driver.call_gcs(self._record))
        adopted = await self.control.open()
        self.words.update(await self._driver.call_gcs(self._take_lease))
        self.cluster.world.log("a controller takes up {} builds; record: {}", adopted[0], self.words)
        self.acts = True
        self.control.start()
        self._operations = {each.path: each for each in replica_operations(self.control, self._membership)}

    def _record(self) -> Words:
        encoded = self.cluster.ray.values.get(RECORD)
        return msgspec.msgpack.decode(encoded, type=Words) if encoded else Words()

    def _take_lease(self) -> Words:
        self.cluster.ray.lease = self
        return self._record()

    async def _save(self, words: Words) -> None:
        encoded = msgspec.msgpack.encode(words)
        await self._driver.call_gcs(lambda: self.cluster.ray.values.update({RECORD: encoded}))

    def kill(self) -> None:
        """At once; the streams of routers end."""
        self.alive = False
        for router in self.cluster.managed_routers:
            router.control.disconnected_from(self)

    def operate(
        self, path: str, body: dict[str, object], respond: Callable[[HeadraceError | None, bool], None]
    ) -> None:
        """One call of the admin API. respond: gets its error, or whether the next controller would know of it."""

        async def call() -> None:
            operation = self._operations[path]
            try:
                document = await operation.run(operation.body.model_validate(body))
            except HeadraceError as error:
                respond(error, True)
            else:
                respond(None, document["recorded"])

        with self.loop.entered():
            self.loop.create_task(call())

    def stop(self) -> "asyncio.Task[None]":
        """Ends the cluster in order."""
        with self.loop.entered():
            return asyncio.create_task(self.control.stop())

    # -- routers -----------------------------------------------------------------------------------------------

    def watch(self, info: control.RouterInfo, lists: Fifo) -> "asyncio.Task[None]":
        """A router's stream of member lists, until its task is cancelled."""

        async def send() -> None:
            async for members in self.service.Watch(control.WatchRequest(router=info), None):
                lists.held_until = max(lists.held_until, self.cluster.network.open_at(self.name, info.id))
                lists.put(members)

        with self.loop.entered():
            return asyncio.create_task(send())

    def report(self, report: control.RouterReport) -> None:
        """A router's report arrives."""
        self.loop.create_task(self.service.Report(report, None))

    # -- replicas ----------------------------------------------------------------------------------------------

    async def _watch_health(
        self, address: str, health: HealthSpec, on_health: Callable[[pb.ReplicaHealth], None]
    ) -> None:
        """As `watch_health`, over simulated connections."""
        while True:
            replica = self.cluster.replica_at(address)
            if replica is not None and self.cluster.network.connected(self.name, address):
                await HealthStream(self, replica, health.interval_seconds, on_health).ended.wait()
            await asyncio.sleep(health.interval_seconds)


class SimKeeper:
    """As `ControllerProcess` and `RouterGroup`; its children end with it."""

    def __init__(self, cluster: "ManagedCluster", spec: ClusterSpec, routers: int) -> None:
        self.alive = True
        self.frozen_until = 0.0
        self.spec = spec
        self._cluster = cluster
        self._world = cluster.world
        self._controller: SimController | None = None
        self._restarts = Restarts(BACKOFF, WINDOW_SECONDS, cluster.world.random.random)
        self._answer_by = 0.0
        self._start_controller()
        cluster.start_routers(routers)
        self._world.at(WATCH_SECONDS, self._watch, self)

    def kill(self) -> None:
        """At once."""
        self.alive = False
        self._cluster.end_routers()
        if self._controller is not None and self._controller.alive:
            self._controller.kill()

    def _start_controller(self) -> None:
        self._controller = self._cluster.add_controller(self.spec)
        self._controller.open()
        self._answer_by = self._world.now + START_SECONDS

    def _watch(self) -> None:
        controller = self._controller
        if controller is not None and self._has_ended(controller):
            if controller.alive:
                controller.kill()
            self._controller = None
            self._world.at(self._restarts.lost(self._world.now), self._start_controller, self)
        self._world.at(WATCH_SECONDS, self._watch, self)

    def _has_ended(self, controller: "SimController") -> bool:
        """Or does not answer for too long."""
        try:
            opened = controller.opened
        except SimRayError:  # of its `open`
            return True
        if controller.alive and opened and not controller.frozen:
            self._answer_by = self._world.now + VIEW_SECONDS
        return not controller.alive or self._world.now >= self._answer_by

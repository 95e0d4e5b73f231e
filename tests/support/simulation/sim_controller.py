"""A controller's process: production's control loop, member list and record, on a simulated Ray."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from headrace_cluster.controller.control_loop import ControlLoop
from headrace_cluster.controller.control_service import ControlService
from headrace_cluster.controller.members import Membership
from headrace_cluster.controller.operations import Operation, replica_operations
from headrace_cluster.core.words import Words
from headrace_cluster.spec.cluster_spec import ClusterSpec
from headrace_cluster.spec.process_specs import HealthSpec
from headrace_proto import control_pb2 as control
from headrace_proto import replica_pb2 as pb
from headrace_proto.errors import HeadraceError
from support.simulation.health_stream import HealthStream
from support.simulation.rank_process import SECRETS
from support.simulation.sim_driver import SimDriver
from support.simulation.virtual_loop import VirtualLoop
from support.simulation.world import Fifo

if TYPE_CHECKING:
    from support.simulation.managed_cluster import ManagedCluster

RECORD = "words"


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
        if self.cluster.world.tracing:
            self.cluster.world.log(f"a controller takes up {adopted[0]} builds; record: {self.words}")
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

    def call(self, work: Callable[[], object]) -> None:
        """An operator's call, now."""
        with self.loop.entered():
            work()

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

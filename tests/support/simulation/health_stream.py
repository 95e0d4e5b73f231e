"""The health messages of one replica to the controller."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from headrace_proto import replica_pb2 as pb
from headrace_proto.channel_options import WATCH_REPLY_SECONDS
from support.simulation.network import Keepalive
from support.simulation.sim_replica import SimReplica
from support.simulation.world import Fifo

if TYPE_CHECKING:
    from support.simulation.sim_controller import SimController


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

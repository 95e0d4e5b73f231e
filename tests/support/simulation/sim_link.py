"""A router's link to one build of a replica."""

from typing import TYPE_CHECKING

from headrace_proto import control_pb2 as control
from headrace_proto import replica_pb2 as pb
from headrace_router.core.replica_state import ReplicaState
from support.simulation.router_stream import RouterStream
from support.simulation.sim_model import MAX_MODEL_LEN
from support.simulation.sim_request import State

if TYPE_CHECKING:
    from support.simulation.sim_router import SimRouter

RECONNECT_SECONDS = 0.1
LINK_SECONDS = 30.0  # the default of `stall_seconds`: without steps, until a link is closed


class SimLink:
    """Keeps a stream open to one build of a replica, as the production link does over gRPC."""

    def __init__(self, router: "SimRouter", member: control.Member) -> None:
        world = router.world
        self.state: State = ReplicaState(
            member, clock=router.clock, new_id=lambda: world.random.randbytes(16), on_send=self._send
        )
        self.stream: RouterStream | None = None
        self.router: SimRouter = router
        self._closed = False
        router.links.append(self)
        self._connect()

    def close(self) -> None:
        self._closed = True
        self.router.links.remove(self)
        if self.stream is not None:
            self.stream.disconnect()

    def check_stall(self) -> None:
        """A stream without steps for longer is closed."""
        if self.stream is not None and self.state.silent(LINK_SECONDS):
            self.stream.disconnect()

    def received(self, frame: pb.ReplicaFrame) -> None:
        if frame.HasField("hello"):
            facts = pb.ModelFacts(identity=frame.hello, max_model_len=MAX_MODEL_LEN)
            self.state.describe(facts, frame.hello.revision)
        self.state.receive(frame)

    def disconnected(self) -> None:
        """All attempts on it are lost; it is opened again after a delay."""
        self.stream = None
        self.state.disconnect()
        if not self._closed:
            self._retry()

    def _retry(self) -> None:
        self.router.world.at(RECONNECT_SECONDS, self._connect, self.router)

    def _connect(self) -> None:
        if self._closed or self.stream is not None:
            return
        cluster = self.router.cluster
        replica = cluster.build(self.state.replica_id, self.state.identity.generation)
        if (
            replica is None
            or replica.stopped
            or replica.frozen_until > self.router.world.now
            or not cluster.network.connected(self.router.name, replica.address)
        ):
            if cluster.busy and (replica is not None or self.state.listing is not None):
                self._retry()
            return
        self.stream = RouterStream(self, replica)
        self._send()

    def _send(self) -> None:
        stream = self.stream
        while stream is not None and (frame := self.state.submit_queue.take()) is not None:
            stream.send(frame)

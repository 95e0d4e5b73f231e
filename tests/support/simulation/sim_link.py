"""A router's link to one build of a replica, and its streams: the frames of the contract, in order."""

from functools import partial
from typing import TYPE_CHECKING, cast

from headrace_base.cluster_member import PAUSE_SECONDS
from headrace_proto import control_pb2 as control
from headrace_proto import replica_pb2 as pb
from headrace_router.core.replica_state import ReplicaState
from headrace_worker.core.request import Output
from headrace_worker.server.convert import fill_delta, merge_output
from support.simulation.sim_model import MAX_MODEL_LEN
from support.simulation.sim_request import State
from support.simulation.world import Fifo, InvariantViolation, Keepalive

if TYPE_CHECKING:
    from support.simulation.sim_replica import SimReplica
    from support.simulation.sim_router import SimRouter


CANCEL_SECONDS = 0.7  # from a cancel until everything of the attempt is released
RECONNECT_SECONDS = 0.1
LINK_SECONDS = 30.0  # the default of `stall_seconds`: without steps, until a link is closed


class RouterStream:
    """From its opening to its end; the router's link opens a new one after that."""

    def __init__(self, link: "SimLink", replica: "SimReplica") -> None:
        self.replica = replica
        self.attempts: set[bytes] = set()  # at the replica
        self.accepted = 0  # submits that the replica's loop has taken
        self.message_faults = 0  # frames that will be lost or duplicated
        self._link = link
        self._router_open = self._replica_open = True
        self._held = False
        self._world = world = replica.world
        self._up = Fifo(world, replica, self._replica_receives)
        self._down = Fifo(world, link.router, self._router_receives)
        self._pending: dict[bytes, pb.Delta] = {}
        self._flushing = False
        self._network = replica.cluster.network
        self._keepalive = Keepalive(self._network, world, replica.address, link.router.name, PAUSE_SECONDS)
        replica.connected(self)
        self._down.put(pb.ReplicaFrame(hello=replica.identity, step=replica.steps, load=replica.load()))

    def send(self, frame: pb.RouterFrame) -> None:
        """Sends a frame of the router."""
        until = self._network.open_at(self._link.router.name, self.replica.address)
        self._up.held_until = max(self._up.held_until, until)
        self._up.put(frame)
        for cancel in frame.cancels:
            self._world.at(CANCEL_SECONDS, partial(self._check_cancelled, cancel.attempt_id))

    def put(self, outputs: list[Output]) -> None:
        """Adds the outputs of one turn of the replica, perhaps none; outputs that were not sent yet are merged."""
        for output in outputs:
            delta = self._pending.get(output.attempt_id)
            if delta is None:
                self._pending[output.attempt_id] = delta = pb.Delta()
                fill_delta(delta, output)
            else:
                merge_output(delta, output)
        if not self._flushing:
            self._flushing = True
            self._world.at(self._world.delay(), self._flush, self.replica)

    @property
    def healthy(self) -> bool:
        """Whether everything that was sent has arrived."""
        uncut = self._network.connected(self._link.router.name, self.replica.address)
        return self._router_open and self._replica_open and not self._held and uncut and not self.replica.unhealthy

    def hold(self, until: float) -> None:
        self._held = True
        self._up.held_until = self._down.held_until = until

    def disconnect(self) -> None:
        """Both ends detect it, each after its own delay."""
        world, router, replica = self._world, self._link.router, self.replica
        to_router = self._network.open_at(replica.address, router.name) - world.now
        to_replica = self._network.open_at(router.name, replica.address) - world.now
        world.at(max(world.delay(), to_router), self._end_router, router)
        world.at(max(world.delay(), to_replica), self._end_replica, replica)

    def _flush(self) -> None:
        self._flushing = False
        if self._keepalive.expired():
            self._end_replica()
            self.disconnect()
            return
        until = self._network.open_at(self.replica.address, self._link.router.name)
        self._down.held_until = max(self._down.held_until, until)
        deltas, self._pending = list(self._pending.values()), {}
        load, accepted = self.replica.load(), self.accepted
        frame = pb.ReplicaFrame(step=self.replica.steps, load=load, deltas=deltas, submits=accepted)
        if self.message_faults and deltas and self._world.chance(0.5):
            self.message_faults -= 1
            if self._world.chance(0.5):
                self._world.at(
                    0.1 * self._world.random.random(), self.disconnect
                )  # TCP reports a loss by closing the connection
                return
            self._down.put(frame)
        self._down.put(frame)

    def _check_cancelled(self, attempt_id: bytes) -> None:
        """A cancelled attempt has ended by now, unless the cancel could not arrive."""
        if self.healthy and attempt_id in self.replica.engine._requests:
            raise InvariantViolation(f"{self.replica.name} still runs an attempt that was cancelled")

    def _router_receives(self, item: object) -> None:
        if self._router_open:
            self._link.received(cast(pb.ReplicaFrame, item))

    def _replica_receives(self, item: object) -> None:
        if not self._replica_open:
            return
        frame = cast(pb.RouterFrame, item)
        for cancel in frame.cancels:
            if cancel.attempt_id in self.attempts:
                self.replica.cancel(cancel.attempt_id)
        for submit in frame.submits:
            self.replica.submitted(self, submit)

    def _end_router(self) -> None:
        if self._router_open:
            self._router_open = False
            self._link.disconnected()

    def _end_replica(self) -> None:
        if self._replica_open:
            self._replica_open = False
            self.replica.router_disconnected(self)


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

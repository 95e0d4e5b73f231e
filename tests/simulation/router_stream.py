"""One stream between a router and a replica: submits and cancels one way, deltas of several steps at once the other."""

from typing import TYPE_CHECKING, cast

from world import Fifo

from headrace_proto import replica_pb2 as pb
from headrace_worker.request import Output
from headrace_worker.server.convert import fill_delta, merge_output

if TYPE_CHECKING:
    from sim_replica import SimReplica
    from sim_router import SimRouter


class RouterStream:
    """From its opening to its end; the router opens another one after that."""

    def __init__(self, router: "SimRouter", replica: "SimReplica") -> None:
        self.router = router
        self.replica = replica
        self.attempts: set[bytes] = set()  # at the replica
        self.mischief = 0  # frames that will be lost or come twice
        self.open = True  # as the router sees it
        self._replica_open = True
        self._held = False
        self._world = world = router.world
        self._up = Fifo(world, replica, self._replica_hears)
        self._down = Fifo(world, None, self._router_hears)
        self._pending: dict[bytes, pb.Delta] = {}
        self._flushing = False

    def submit(self, submit: pb.Submit) -> None:
        self._up.put(submit)

    def cancel(self, attempt_id: bytes) -> None:
        if self.open:
            self._up.put(attempt_id)

    def put(self, outputs: list[Output]) -> None:
        """The replica's step brought these; what was not sent yet is merged."""
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
    def undisturbed(self) -> bool:
        """Whether what was said has got through."""
        return self.open and self._replica_open and not self._held and not self.replica.troubled

    def hold(self, until: float) -> None:
        self._held = True
        self._up.held_until = self._down.held_until = until

    def break_down(self) -> None:
        """Both notice, each in its own time."""
        world = self._world
        world.at(world.delay(), self._end_router)
        world.at(world.delay(), self._end_replica, self.replica)

    def _flush(self) -> None:
        self._flushing = False
        deltas, self._pending = list(self._pending.values()), {}
        if self.mischief and self._world.chance(0.5):
            self.mischief -= 1
            if self._world.chance(0.5):
                self._world.at(0.1 * self._world.random.random(), self.break_down)  # TCP loses nothing in silence
                return
            self._down.put(deltas)
        self._down.put(deltas)

    def _router_hears(self, item: object) -> None:
        if self.open:
            self.router.heard(self, cast(list[pb.Delta], item))

    def _replica_hears(self, item: object) -> None:
        if not self._replica_open:
            return
        if isinstance(item, bytes):
            if item in self.attempts:
                self.replica.cancel(item)
        else:
            self.replica.submitted(self, cast(pb.Submit, item))

    def _end_router(self) -> None:
        if self.open:
            self.open = False
            self.router.disconnected(self)

    def _end_replica(self) -> None:
        if self._replica_open:
            self._replica_open = False
            self.replica.router_gone(self)

"""One control stream from a target to a source; its ends behave like `server/transfer_{client,service}.py`."""

from collections import deque
from typing import TYPE_CHECKING, cast

from headrace_worker.core.transfer.messages import FromSource, ToSource
from headrace_worker.server.transfer_peer import InvalidTransferError, frame, from_source, to_source
from support.simulation.world import Fifo

if TYPE_CHECKING:
    from support.simulation.sim_replica import SimReplica

HELLO_SECONDS = 3.0
_END = object()


class TransferStream:
    """Opened by the target's first message to an address."""

    def __init__(self, target: "SimReplica", address: str) -> None:
        self.target = target
        self.address = address
        self.source: SimReplica | None = None
        self.name = ""  # the target's name at the source
        self.disturbed = False  # its messages were delayed
        self._world = world = target.world
        self._open = False  # both have sent hello
        self._target_closed = self._source_closed = False
        self._waiting: deque[ToSource] = deque()
        self._up: Fifo | None = None
        self._down = Fifo(world, target, self._target_receives)
        world.at(world.delay(), self._reach, target)
        world.at(HELLO_SECONDS, lambda: None if self._open else self._time_out(), target)

    @property
    def closed(self) -> bool:
        return self._target_closed and (self.source is None or self._source_closed)

    # -- interface of the ends ---------------------------------------------------------------------------------

    def send_to_source(self, message: ToSource) -> None:
        """Sends a message of the target."""
        if not self._open or self._up is None:
            self._waiting.append(message)
        else:
            self._up.put(message)

    def send_to_target(self, message: FromSource) -> None:
        """Sends a message of the source."""
        if not self._source_closed:
            self._down.put(message)

    def close(self) -> None:
        """The target closes the stream; the source detects it after a delay."""
        self._target_closed = True
        self._notify_source()

    def disconnect(self) -> None:
        """Both ends detect it, each after its own delay."""
        world = self._world
        world.at(world.delay(), self._end_target, self.target)
        self._notify_source()

    def hold(self, until: float) -> None:
        """Delays all messages until then."""
        self.disturbed = True
        self._down.held_until = until
        if self._up is not None:
            self._up.held_until = until

    # -- inside -----------------------------------------------------------------------------------------------

    def _reach(self) -> None:
        """The target's call arrives, if the source is running and reachable."""
        if self._target_closed:
            return
        cluster, world = self.target.cluster, self._world
        source = cluster.replica_at(self.address)
        if source is None or not cluster.network.connected(self.target.address, source.address):
            world.at(world.delay(), self._end_target, self.target)
            return
        self.source = source
        self._up = Fifo(world, source, self._source_receives)
        world.at(world.delay(), self._accept, source)

    def _accept(self) -> None:
        source = self.source
        assert source is not None
        try:
            order = source.peer.connect(self.target.peer.hello(), reads=False)
        except InvalidTransferError:
            order = None
        if order is None or source.stopped:
            self._source_closed = True
            self._down.put(_END)
            return
        self.name = source.name_of(self)
        source.command(lambda exchange: exchange.granter.connect(self.name, order))
        if self._source_closed:
            self._end_source()
            return
        self._down.put(None)

    def _target_receives(self, item: object) -> None:
        target = self.target
        if self._target_closed:
            return
        if item is _END:
            self._end_target()
        elif item is None:
            self._open = True
            assert self.source is not None and self._up is not None
            order = target.peer.connect(self.source.peer.hello(), reads=True)
            target.command(lambda exchange: exchange.fetcher.connect(self.address, order))
            while self._waiting:
                self._up.put(self._waiting.popleft())
        else:
            message = from_source(frame(cast(FromSource, item)))
            target.command(lambda exchange: exchange.fetcher.receive(self.address, message))

    def _source_receives(self, item: object) -> None:
        if self._source_closed or self.source is None:
            return
        message = to_source(frame(cast(ToSource, item)))
        self.source.command(lambda exchange: exchange.granter.receive(self.name, message))

    def _time_out(self) -> None:
        if not self._target_closed:
            self._end_target()
            self._notify_source()

    def _end_target(self) -> None:
        """The target detects that the stream has ended."""
        if self._target_closed:
            return
        self._target_closed = True
        self.target.source_disconnected(self)
        self._notify_source()

    def _notify_source(self) -> None:
        if self.source is not None:
            self._world.at(self._world.delay(), self._end_source, self.source)

    def _end_source(self) -> None:
        if not self._source_closed:
            self._source_closed = True
            if self.name and self.source is not None:
                self.source.target_disconnected(self)

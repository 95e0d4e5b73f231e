"""KV transfers of one replica: the messages and orders of production's protocol, over links that take their time.

A replica sends one chunk at a time, and receives any number: its sending bandwidth is what a transfer waits for.
"""

from collections.abc import Callable
from typing import Protocol

from headrace_cluster.simulator.replica_shape import ReplicaShape
from headrace_cluster.simulator.virtual_time import VirtualTime
from headrace_worker.core.config import Rendezvous
from headrace_worker.core.engine import Engine
from headrace_worker.core.transfer.exchange import Outbound
from headrace_worker.core.transfer.messages import FromSource, ToSource
from headrace_worker.core.transfer.orders import OpenPair, Order, Receive, Received, Send, Sent

CONNECT_SECONDS = 0.05  # of two replicas that have not exchanged blocks before
_RENDEZVOUS = Rendezvous("", 0, b"")


class Process(Protocol):
    """A replica's process."""

    name: str
    alive: bool
    engine: Engine
    transfers: "Transfers"

    def clock(self) -> float:
        """Of its engine."""

    def command(self, action: Callable[[], None]) -> None:
        """Something for the engine, before its next step."""


class Transfers:
    """Peers are named by their addresses, on both sides."""

    def __init__(
        self,
        time: VirtualTime,
        owner: Process,
        shape: ReplicaShape,
        network: float,
        peer: Callable[[str], Process | None],
    ) -> None:
        self._time = time
        self._owner = owner
        self._shape = shape
        self._network = network
        self._peer = peer
        self._sources: dict[str, float] = {}  # connected, or being connected: since when messages pass
        self._targets: set[str] = set()
        self._pairs: dict[int, str] = {}  # the other replica of each pair
        self._numbers: dict[str, int] = {}  # of the pair with a target
        self._sending_until = 0.0
        self._arrived: dict[tuple[str, int, int], float] = {}  # chunks, with the time of their last byte
        self._awaited: dict[tuple[str, int, int], Receive] = {}

    def send(self, outbound: Outbound, at: float) -> None:
        """Sends messages of the engine at that time."""
        for address, message in outbound.to_sources:
            self._to_source(address, message, at)
        for address, answer in outbound.to_targets:
            self._to_target(address, answer, at)
        for address in outbound.disconnect:
            self._disconnect(address)

    def end(self) -> None:
        """The process has ended: its peers lose their connections."""
        for address in [*self._sources, *self._targets]:
            self._disconnect(address)

    def execute(self, order: Order) -> None:
        """An order of a plan, at the end of the plan's step."""
        now = self._owner.clock()
        if isinstance(order, OpenPair):
            return
        if isinstance(order, Send):
            target = self._pairs.get(order.pair)
            if target is None:
                return
            blocks = sum(len(row) for row in order.blocks)
            seconds = self._shape.latency.transfer_seconds(blocks * self._shape.block_size)
            self._sending_until = max(now, self._sending_until) + seconds
            sent = Sent(0, order.pair, blocks, seconds)
            self._at(self._sending_until, lambda: self._report(sent))
            self._at(self._sending_until + self._network, lambda: self._chunk_arrives(target, order))
        elif isinstance(order, Receive) and (source := self._pairs.get(order.pair)) is not None:
            key = source, order.fetch, order.chunk
            if key in self._arrived:
                del self._arrived[key]
                self._received(order)
            else:
                self._awaited[key] = order

    def _chunk_arrives(self, target: str, order: Send) -> None:
        peer = self._peer(target)
        if peer is not None:
            peer.transfers.chunk_arrived(self._owner.name, order.fetch, order.chunk)

    def chunk_arrived(self, source: str, fetch: int, chunk: int) -> None:
        """The last byte of a chunk is here."""
        order = self._awaited.pop((source, fetch, chunk), None)
        if order is not None:
            self._received(order)
        else:
            self._arrived[source, fetch, chunk] = self._time.now

    def _received(self, order: Receive) -> None:
        size = sum(order.counts) * self._shape.block_size * self._shape.latency.kv_bytes
        report = Received(0, order.pair, order.fetch, order.chunk, True, size)
        self._time.after(0.0, lambda: self._report(report))

    def _report(self, report: Sent | Received) -> None:
        owner = self._owner
        if owner.alive:
            owner.command(lambda: owner.engine.exchange.handle_report(report))

    def _to_source(self, address: str, message: ToSource, at: float) -> None:
        open_at = self._sources.get(address)
        if open_at is None:
            open_at = self._sources[address] = at + CONNECT_SECONDS
            self._at(open_at, lambda: self._open(address))
        owner = self._owner

        def arrive() -> None:
            source = self._peer(address)
            if source is None or address not in self._sources:
                self._lost(address)
            else:
                source.command(lambda: source.engine.exchange.receive_from_target(owner.name, message))

        self._at(max(at, open_at) + self._network, arrive)

    def _to_target(self, address: str, message: FromSource, at: float) -> None:
        owner = self._owner

        def arrive() -> None:
            target = self._peer(address)
            if target is not None:
                target.command(lambda: target.engine.exchange.receive_from_source(owner.name, message))

        self._at(at + self._network, arrive)

    def _open(self, address: str) -> None:
        """Both sides are connected."""
        owner, source = self._owner, self._peer(address)
        if source is None or not owner.alive:
            self._lost(address)
            return
        mine, theirs = self._open_pair(address, sends=False), source.transfers.opened_by(owner.name)
        owner.command(lambda: owner.engine.exchange.open_source(address, mine))
        source.command(lambda: source.engine.exchange.open_target(owner.name, theirs))

    def opened_by(self, target: str) -> OpenPair:
        """A target has connected to this source."""
        self._targets.add(target)
        return self._open_pair(target, sends=True)

    def _open_pair(self, address: str, *, sends: bool) -> OpenPair:
        number = len(self._pairs) + 1
        self._pairs[number] = address
        return OpenPair(number, _RENDEZVOUS, 2, 0, 1, (), sends=sends)

    def _disconnect(self, address: str) -> None:
        """The other side detects it after the network's delay."""
        self._sources.pop(address, None)
        self._targets.discard(address)
        peer = self._peer(address)
        if peer is not None:
            self._time.after(self._network, lambda: peer.transfers.peer_left(self._owner.name))

    def peer_left(self, address: str) -> None:
        """The other replica has closed the connection, or ended."""
        owner = self._owner
        if address in self._targets:
            self._targets.discard(address)
            owner.command(lambda: owner.engine.exchange.target_lost(address))
        if address in self._sources:
            self._lost(address)

    def _lost(self, address: str) -> None:
        owner = self._owner
        if owner.alive and self._sources.pop(address, None) is not None:
            owner.command(lambda: owner.engine.exchange.source_lost(address))

    def _at(self, time: float, call: Callable[[], None]) -> None:
        self._time.at(time, lambda: call() if self._owner.alive else None)

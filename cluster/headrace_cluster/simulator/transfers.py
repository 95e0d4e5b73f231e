"""KV transfers of one replica: the messages and orders of production's protocol, over links that take their time.

One chunk at a time is read from a replica, and it reads any number: the source's bandwidth is what a read waits for.
"""

from collections.abc import Callable
from typing import Protocol

from headrace_cluster.simulator.replica_shape import ReplicaShape
from headrace_cluster.simulator.virtual_time import VirtualTime
from headrace_worker.core.engine import Engine
from headrace_worker.core.transfer.exchange import Outbound
from headrace_worker.core.transfer.messages import FromSource, ToSource
from headrace_worker.core.transfer.orders import (
    Announce,
    ChunkRead,
    Connect,
    End,
    FetchOver,
    Order,
    Read,
    TransferReport,
)

CONNECT_SECONDS = 0.05  # time to connect two replicas that have not exchanged blocks before


class Process(Protocol):
    """A replica's process."""

    name: str
    alive: bool
    engine: Engine
    transfers: "SimulatedTransfers"

    def clock(self) -> float:
        """The time of the replica's engine."""

    def command(self, action: Callable[[], None]) -> None:
        """Something for the engine, before its next step."""


class SimulatedTransfers:
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
        self._peers: dict[int, tuple[str, bool]] = {}  # by their numbers in orders: the address; whether it is a source
        self._busy_until = 0.0  # as the source
        self._computed: set[tuple[str, int, int]] = set()  # chunks that sources have announced
        self._awaited: dict[tuple[str, int, int], Read] = {}

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
        match order:
            case Announce(peer, fetch, chunk, computed=False):
                target = self._peer(self._peers[peer][0])
                if target is not None:
                    name, transfers = self._owner.name, target.transfers
                    self._at(self._owner.clock() + self._network, lambda: transfers.announced(name, fetch, chunk))
            case Read(peer, fetch, chunk):
                key = self._peers[peer][0], fetch, chunk
                if order.computed or key in self._computed:
                    self._computed.discard(key)
                    self._read(key[0], order, self._owner.clock())
                else:
                    self._awaited[key] = order
            case End(peer, fetch) if self._peers[peer][1]:
                self._time.after(0.0, lambda: self._report(FetchOver(0, fetch)))

    def announced(self, source: str, fetch: int, chunk: int) -> None:
        """A source has computed a chunk."""
        order = self._awaited.pop((source, fetch, chunk), None)
        if order is not None:
            self._read(source, order, self._time.now)
        else:
            self._computed.add((source, fetch, chunk))

    def _read(self, address: str, order: Read, now: float) -> None:
        source, tokens = self._peer(address), sum(map(len, order.mine)) * self._shape.block_size
        if source is None:
            self._at(now, lambda: self._report(ChunkRead(0, order.fetch, order.chunk, good=False)))
            return
        seconds, size = self._shape.latency.transfer_seconds(tokens), tokens * self._shape.latency.kv_bytes
        report = ChunkRead(0, order.fetch, order.chunk, True, size, seconds)
        self._at(source.transfers.occupy(now, seconds) + self._network, lambda: self._report(report))

    def occupy(self, now: float, seconds: float) -> float:
        """As the source, for a read: when its last byte leaves."""
        self._busy_until = max(now, self._busy_until) + seconds
        return self._busy_until

    def _report(self, report: TransferReport) -> None:
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
                source.command(lambda: source.engine.exchange.granter.receive(owner.name, message))

        self._at(max(at, open_at) + self._network, arrive)

    def _to_target(self, address: str, message: FromSource, at: float) -> None:
        owner = self._owner

        def arrive() -> None:
            target = self._peer(address)
            if target is not None:
                target.command(lambda: target.engine.exchange.fetcher.receive(owner.name, message))

        self._at(at + self._network, arrive)

    def _open(self, address: str) -> None:
        """Both sides are connected."""
        owner, source = self._owner, self._peer(address)
        if source is None or not owner.alive:
            self._lost(address)
            return
        mine, theirs = self._connect(address, reads=True), source.transfers.connected_by(owner.name)
        owner.command(lambda: owner.engine.exchange.fetcher.connect(address, mine))
        source.command(lambda: source.engine.exchange.granter.connect(owner.name, theirs))

    def connected_by(self, target: str) -> Connect:
        """A target has connected to this source."""
        self._targets.add(target)
        return self._connect(target, reads=False)

    def _connect(self, address: str, *, reads: bool) -> Connect:
        number = len(self._peers) + 1
        self._peers[number] = address, reads
        return Connect(number, (), (), reads)

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
            owner.command(lambda: owner.engine.exchange.granter.peer_lost(address))
        if address in self._sources:
            self._lost(address)

    def _lost(self, address: str) -> None:
        owner = self._owner
        if owner.alive and self._sources.pop(address, None) is not None:
            owner.command(lambda: owner.engine.exchange.fetcher.peer_lost(address))

    def _at(self, time: float, call: Callable[[], None]) -> None:
        self._time.at(time, lambda: call() if self._owner.alive else None)

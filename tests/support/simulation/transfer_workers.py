"""The transfer workers of a rank, and reads of other ranks' memory: as events, not threads.

Simulates `kv_transfer/transfer_worker.py` and NIXL below it. A piece is one layer of one route: it leaves the source's
memory at one time and reaches the target's at a later one, whatever both have done with their blocks meanwhile.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

from headrace_worker.core.kv.blocks import Content
from headrace_worker.core.transfer.orders import (
    Announce,
    ChunkRead,
    Connect,
    Disconnect,
    End,
    Erase,
    FetchOver,
    FileBlock,
    Fill,
    Load,
    Order,
    Read,
    Save,
    Store,
    TransferReport,
)
from headrace_worker.core.transfer.shards import Route
from support.simulation.shadow import NOTHING, Cell, RankShadow
from support.simulation.world import InvariantViolation, Owner, World

Notice = tuple[bytes, int, int]  # the source's agent, fetch, chunk
Pieces = dict[tuple[int, int], Cell]  # of a block, by layer and head
STATE = (-1, -1)  # of a snapshot, in place of layer and head: its one tag
Disk = dict[int, tuple[Content, Pieces]]  # a rank's file: by place


@dataclass(slots=True)
class DataNetwork:
    """What all reads go through."""

    world: World
    agents: dict[bytes, "SimTransferWorker"] = field(default_factory=dict)  # of ranks that are alive
    held_until: float = 0.0
    to_fail: int = 0  # pieces

    def delay(self) -> float:
        return max(self.world.delay(), self.held_until - self.world.now)

    def source(self, agent: bytes) -> "SimTransferWorker | None":
        """The worker whose memory is to be read, if the read does not fail."""
        if self.to_fail and self.world.chance(0.5):
            self.to_fail -= 1
            return None
        return self.agents.get(agent)


@dataclass(slots=True, eq=False)
class LayerGate:
    """Opens when the step of a plan has written its keys and values on this rank."""

    opened: bool = False


@dataclass(slots=True, eq=False)
class _Reading:
    order: Read
    left: list[Route]
    under_way: int = 0  # pieces
    failed: bool = False
    ended: bool = False  # by an End


class SimTransferWorker:
    """The transfer worker of one rank."""

    def __init__(
        self,
        world: World,
        owner: Owner,
        shadow: RankShadow,
        agent: bytes,
        network: DataNetwork,
        report: Callable[[TransferReport], None],
        over: Callable[[int, Read], None],
        disk: Disk,
    ) -> None:
        """`over` is called when the rank does not write blocks of a chunk any more. disk: of all builds of the rank."""
        self.world = world
        self.owner = owner
        self.shadow = shadow
        self.peers: dict[int, Connect] = {}
        self.reading: list[_Reading] = []
        self.loading: list[Load] = []
        self._host: dict[tuple[int, int], Pieces] = {}  # by cache group and slot
        self._disk = disk
        self._agent = agent
        self._network = network
        self._report = report
        self._over = over
        self._announcing: list[tuple[Announce, LayerGate | None]] = []
        self._ending: list[tuple[int, int]] = []
        self._notices: set[Notice] = set()
        network.agents[agent] = self

    def execute(self, order: Order, gate: LayerGate | None) -> None:
        match order:
            case Connect():
                if order.peer in self.peers:
                    raise InvariantViolation(f"peer {order.peer} is connected twice")
                self.peers[order.peer] = order
            case Disconnect(peer):
                del self.peers[peer]
            case Announce():
                if not order.computed:
                    self._announcing.append((order, gate))
            case Read():
                self.reading.append(_Reading(order, self._routes(order.peer)))
                self.wake()
            case Load():
                self.loading.append(order)
                self._copy(order)
            case Store():
                self._copy(order)
            case Save(fetch, blocks) | Fill(fetch, blocks):
                self._file(fetch, blocks, saves=isinstance(order, Save))
            case Erase(places):
                for place in places:
                    self._disk.pop(place, None)
            case End(peer, fetch):
                self._announcing = [each for each in self._announcing if (each[0].peer, each[0].fetch) != (peer, fetch)]
                if self.peers[peer].reads:
                    self._ending.append((peer, fetch))
                    for reading in self.reading:
                        reading.ended = reading.ended or (reading.order.peer, reading.order.fetch) == (peer, fetch)
                    self.wake()

    def opened(self) -> None:
        """A gate was opened."""
        announcing, self._announcing = self._announcing, []
        for order, gate in announcing:
            if gate is not None and not gate.opened:
                self._announcing.append((order, gate))
                continue
            for route in self._routes(order.peer):
                target = self._network.agents.get(self.peers[order.peer].ranks[route.target].agent)
                if target is not None:
                    target.notify((self._agent, order.fetch, order.chunk))

    def notify(self, notice: Notice) -> None:
        """A notice is sent to this rank."""

        def arrive() -> None:
            self._notices.add(notice)
            self._progress()

        self.world.at(self._network.delay(), arrive, self.owner)

    def blocks_in_transfer(self) -> set[int]:
        """Blocks that the worker may still write."""
        groups = len(self.shadow.windows)
        loads = {block for order in self.loading for row in order.blocks[:groups] for block in row}
        return loads | {block for reading in self.reading for row in reading.order.mine[:groups] for block in row}

    def states_in_loads(self) -> set[int]:
        """Slots of states that loads may still write."""
        groups = len(self.shadow.windows)
        return {slot for order in self.loading for row in order.blocks[groups:] for slot in row}

    def _copy(self, order: Load | Store) -> None:
        """Within this rank: each block leaves one memory and reaches the other at times of its own."""
        pairs = [
            (group, slot, block)
            for group, (slots, blocks) in enumerate(zip(order.slots, order.blocks, strict=True))
            for slot, block in zip(slots, blocks, strict=True)
        ]
        left = len(pairs)

        def leave(group: int, slot: int, block: int) -> None:
            empty = [NOTHING] * self.shadow.block_size
            is_state = group == len(self.shadow.windows)
            cells, parts = self.shadow.cells, self.shadow.parts[group] if not is_state else []
            if isinstance(order, Store) and is_state:
                pieces = {STATE: [self.shadow.states.get(block, NOTHING)]}
            elif isinstance(order, Store):
                pieces = {part: list(cells[part].get(block, empty)) for part in parts}
            else:
                pieces = dict(self._host[group, slot])
            self.world.at(self.world.delay() / 4, lambda: reach(group, slot, block, pieces), self.owner)

        def reach(group: int, slot: int, block: int, pieces: Pieces) -> None:
            nonlocal left
            left -= 1
            if isinstance(order, Store):
                self._host[group, slot] = pieces
            else:
                for part, cell in pieces.items():
                    if part == STATE:
                        self.shadow.states[block] = cell[0]
                    else:
                        self.shadow.cells[part][block] = list(cell)
            if not left:
                if isinstance(order, Load):
                    self.loading.remove(order)
                self._report(ChunkRead(self.shadow.number, order.fetch, 0, True))

        for pair in pairs:
            self.world.at(self.world.delay() / 4, lambda pair=pair: leave(*pair), self.owner)  # type: ignore[misc]

    def _file(self, fetch: int, blocks: tuple[FileBlock, ...], *, saves: bool) -> None:
        bad, left = [], len(blocks)

        def do(block: FileBlock) -> None:
            nonlocal left
            left -= 1
            content, fails = Content(block.group, block.digest, block.tokens), self.world.chance(0.01)
            if saves and not fails:
                self._disk[block.place] = content, dict(self._host[block.group, block.slot])
            elif not fails and block.place in self._disk and self._disk[block.place][0] == content:
                self._host[block.group, block.slot] = dict(self._disk[block.place][1])
            else:
                bad.append(block.place)
            if not left:
                self._report(ChunkRead(self.shadow.number, fetch, 0, not bad, 0, 0.001, tuple(bad)))

        for block in blocks:
            self.world.at(self.world.delay(), lambda block=block: do(block), self.owner)  # type: ignore[misc]

    def wake(self) -> None:
        self.world.at(self.world.delay(), self._progress, self.owner)

    def _routes(self, peer: int) -> list[Route]:
        order = self.peers[peer]
        return [r for r in order.routes if (r.target if order.reads else r.source) == self.shadow.number]

    def _progress(self) -> None:
        for reading in list(self.reading):
            order = reading.order
            peer = self.peers.get(order.peer)
            reading.ended = reading.ended or peer is None  # it was disconnected
            ranks = peer.ranks if peer is not None else ()
            for route in [] if reading.ended else list(reading.left):
                agent = ranks[route.source].agent
                if order.computed or (agent, order.fetch, order.chunk) in self._notices:
                    reading.left.remove(route)
                    self._begin(reading, route, agent)
            if reading.under_way or (reading.left and not (reading.failed or reading.ended)):
                continue
            self.reading.remove(reading)
            self._over(self.shadow.number, order)
            if not reading.ended:
                good = not reading.failed
                self._report(ChunkRead(self.shadow.number, order.fetch, order.chunk, good, 1, 0.001))
        for peer_number, fetch in list(self._ending):
            if all((each.order.peer, each.order.fetch) != (peer_number, fetch) for each in self.reading):
                self._ending.remove((peer_number, fetch))
                self._report(FetchOver(self.shadow.number, fetch))

    def _begin(self, reading: _Reading, route: Route, agent: bytes) -> None:
        for group, shard in enumerate(route.groups):
            for layer in shard.layers if reading.order.mine[group] else ():
                if group < len(self.shadow.windows):
                    self._begin_piece(reading, agent, group, layer, range(*shard.units))
                else:
                    self._begin_state(reading, agent, *reading.order.theirs[group], *reading.order.mine[group])

    def _begin_state(self, reading: _Reading, agent: bytes, theirs: int, mine: int) -> None:
        reading.under_way += 1

        def leave() -> None:
            source = self._network.source(agent)
            tag = source.shadow.states.get(theirs, NOTHING) if source is not None else None

            def reach() -> None:
                if tag is None:
                    reading.failed = True
                else:
                    self.shadow.states[mine] = tag
                reading.under_way -= 1
                self.wake()

            self.world.at(self._network.delay(), reach)

        self.world.at(self._network.delay(), leave)

    def _begin_piece(self, reading: _Reading, agent: bytes, group: int, layer: int, units: range) -> None:
        reading.under_way += 1

        def leave() -> None:
            source = self._network.source(agent)
            piece = source.shadow.read(layer, units, reading.order.theirs[group]) if source is not None else None

            def reach() -> None:
                if piece is None:
                    reading.failed = True
                else:
                    self.shadow.write(layer, units, reading.order.mine[group], piece)
                reading.under_way -= 1
                self.wake()

            self.world.at(self._network.delay(), reach)

        self.world.at(self._network.delay(), leave)

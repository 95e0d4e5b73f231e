"""Orders of rank 0 to the transfer workers of all its ranks, in the plans of steps and hence in order with them.

A rank takes the orders of a plan before the plan's work. Blocks that a worker writes are reserved from the order that
names them until every rank has reported that the fetch is over there: a read cannot be stopped.
"""

from msgspec import Struct

from headrace_worker.core.transfer.shards import RankShard, Route


class Connect(Struct, frozen=True, tag="connect"):
    """Learn of the ranks of another replica, in their order."""

    peer: int
    ranks: tuple[RankShard, ...]  # with their agents and memory
    routes: tuple[Route, ...]
    reads: bool  # this replica is the target


class Disconnect(Struct, frozen=True, tag="disconnect"):
    """Forget the ranks of another replica, once no read from them is under way."""

    peer: int


class Announce(Struct, frozen=True, tag="announce"):
    """As the source: serve a fetch from now on, and notify the target's ranks as this plan's work computes layers."""

    peer: int
    fetch: int
    chunk: int
    computed: bool  # there is nothing to wait for: the targets know


class Read(Struct, frozen=True, tag="read"):
    """As the target: read a chunk's blocks, each layer as soon as its source has computed it."""

    peer: int
    fetch: int
    chunk: int
    theirs: tuple[tuple[int, ...], ...]  # per cache group
    mine: tuple[tuple[int, ...], ...]
    computed: bool


class End(Struct, frozen=True, tag="end"):
    """No further read for this fetch is started; on the target each rank reports when the last one is over."""

    peer: int
    fetch: int


class Load(Struct, frozen=True, tag="load"):
    """Copy slots of this rank's host memory into blocks. Reported as a read of chunk 0."""

    fetch: int
    slots: tuple[tuple[int, ...], ...]  # per cache group; the last ones are of recurrent states, where there are some
    blocks: tuple[tuple[int, ...], ...]


class Store(Struct, frozen=True, tag="store"):
    """Copy blocks into slots of this rank's host memory. Reported as a read of chunk 0."""

    fetch: int
    blocks: tuple[tuple[int, ...], ...]  # per cache group
    slots: tuple[tuple[int, ...], ...]


class FileBlock(Struct, frozen=True):
    """A block in host memory and in the rank's file."""

    slot: int
    place: int
    group: int
    digest: bytes
    tokens: bytes  # little-endian u32


class Save(Struct, frozen=True, tag="save"):
    """Write slots of this rank's host memory to its file. Reported as a read of chunk 0."""

    fetch: int
    blocks: tuple[FileBlock, ...]


class Fill(Struct, frozen=True, tag="fill"):
    """Read blocks of this rank's file into slots of its host memory. Reported as a read of chunk 0."""

    fetch: int
    blocks: tuple[FileBlock, ...]


class Erase(Struct, frozen=True, tag="erase"):
    """The places of this rank's file hold nothing, also for the replica's next process. Not reported."""

    places: tuple[int, ...]


Order = Connect | Disconnect | Announce | Read | End | Load | Store | Save | Fill | Erase


class ChunkRead(Struct, frozen=True, tag="read"):
    """A rank of the target has read its part of a chunk, in so many seconds from the first layer that it could read.

    Not `good`: the source cannot be read.
    """

    rank: int
    fetch: int
    chunk: int
    good: bool
    num_bytes: int = 0
    seconds: float = 0.0
    bad: tuple[int, ...] = ()  # places that do not hold what they should, after a Fill


class FetchOver(Struct, frozen=True, tag="over"):
    """After an End: this rank of the target writes no block of the fetch any more."""

    rank: int
    fetch: int


TransferReport = ChunkRead | FetchOver

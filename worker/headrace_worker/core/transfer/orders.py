"""Orders of rank 0 to the transfer workers of all its ranks, in the plans of steps and hence in order with them.

A transfer worker reads or writes a block only between the order that names it and the `Drop` of its fetch. A rank takes
the orders of a plan before the plan's work, so a request that gets the block in that plan or later has exclusive use.
"""

from msgspec import Struct

from headrace_worker.core.config import Rendezvous
from headrace_worker.core.transfer.shards import Route


class OpenPair(Struct, frozen=True, tag="open"):
    """Connect to the ranks of another replica. Ranks of the target come first in the pair's group."""

    pair: int
    rendezvous: Rendezvous
    size: int  # ranks of both
    first: int  # number in the pair's group of this replica's rank 0
    peers: int  # number in the pair's group of the other replica's rank 0
    routes: tuple[Route, ...]
    sends: bool  # this replica is the source


class ClosePair(Struct, frozen=True, tag="close"):
    """Close the pair's connections, and end all waits on them."""

    pair: int


class Send(Struct, frozen=True, tag="send"):
    """Send blocks, which are complete after this plan's work, as the next chunk of a fetch."""

    pair: int
    fetch: int
    chunk: int
    blocks: tuple[tuple[int, ...], ...]  # per cache group


class Receive(Struct, frozen=True, tag="receive"):
    """Receive the next chunk of the pair and, unless its fetch is dropped by then, write it into these blocks.

    A chunk of an ended fetch is received as well, since both ends count chunks; it has no blocks then.
    """

    pair: int
    fetch: int
    chunk: int
    counts: tuple[int, ...]  # blocks per cache group
    blocks: tuple[tuple[int, ...], ...] = ()


class Drop(Struct, frozen=True, tag="drop"):
    """From now on no block is read or written for this fetch."""

    pair: int
    fetch: int


Order = OpenPair | ClosePair | Send | Receive | Drop


class Received(Struct, frozen=True, tag="received"):
    """A rank has received a chunk. `good`: all of it is in its blocks, count and MAC agree."""

    rank: int
    pair: int
    fetch: int
    chunk: int
    good: bool
    num_bytes: int = 0


class Sent(Struct, frozen=True, tag="sent"):
    """A rank has sent a chunk. `seconds`: for so many blocks, without the waits for their computation."""

    rank: int
    pair: int
    blocks: int
    seconds: float


class PairFailed(Struct, frozen=True, tag="failed"):
    """A rank lost the connections of a pair; no further reports follow."""

    rank: int
    pair: int
    error: str


TransferReport = Received | Sent | PairFailed

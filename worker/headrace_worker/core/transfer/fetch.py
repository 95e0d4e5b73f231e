"""One fetch of a prompt's blocks: its chunks, and how many of them are usable."""

from dataclasses import dataclass, field

from headrace_worker.core.kv.manager import BlockTable
from headrace_worker.core.request import Request
from headrace_worker.core.transfer.messages import Offer
from headrace_worker.core.transfer.shards import Span


def patience(step_seconds: float) -> float:
    """Seconds without a message of a source whose steps take so long, after which it counts as stalled, and what is
    read as invalid: it answers between steps, after up to two. Its lease is longer.
    """
    return min(max(2.0, 6 * step_seconds), 20.0)


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Times in seconds, on this replica's clock."""

    min_blocks: int = 2  # fewer are computed locally
    margin: float = 0.05  # by which computing a prompt here must be faster, when a router chose a source that computes
    min_seconds: float = 2.0  # lower bound of a fetch's time limit
    max_seconds: float = 600.0  # upper bound of a fetch's time limit
    slowdown: float = 4.0  # the time limit, as a multiple of the time to compute the blocks here
    deadline_share: float = 0.5  # upper bound, as a share of the time until the request's deadline
    renew: float = 0.5  # between two renewals to a source
    avoid: float = 1.0  # during which a lost source is not used
    avoid_silent: float = 10.0  # the same of one that left a fetch without a message: it may be stalled for long
    speed_seconds: float = 60.0  # that a source's measured speed counts: one that was slow is tried again
    watermark: float = 0.05  # share of the pool that reservations leave to running requests

    def timeout(self, local_seconds: float, deadline: float | None, now: float) -> float:
        """Seconds that a fetch may wait for its source, and again compute there: by those to compute it here, and the
        request's deadline.
        """
        timeout = min(max(self.min_seconds, self.slowdown * local_seconds), self.max_seconds)
        return timeout if deadline is None else min(timeout, self.deadline_share * (deadline - now))


@dataclass(slots=True)
class FetchCounters:
    """Monotonic."""

    started: int = 0
    done: int = 0
    failed: int = 0
    num_bytes: int = 0
    seconds: float = 0.0  # of completed fetches


@dataclass(slots=True)
class Chunk:
    """Blocks that a source offers, from `first` to before `stop`."""

    first: int
    stop: int
    missing: set[int]  # ranks that have not read it
    cached: int = 0  # leading blocks that the source had in its prefix cache
    committed: bool = False

    @property
    def usable(self) -> bool:
        return self.committed and not self.missing


@dataclass(slots=True)
class Fetch:
    """A fetch, from its request to the source until its request is queued."""

    number: int
    peer: str
    request: Request
    blocks: int
    local_blocks: int  # leading blocks that this replica has already
    held: BlockTable
    wanted: list[Span]  # per cache group
    deadline: float  # until the source computes; then moved
    started: float
    seconds_per_block: float  # predicted, to compute it here
    computing: bool = False  # whether the source has begun to compute the prompt
    reserved: list[list[int]] | None = None  # per cache group: one block for each wanted index
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def offered(self) -> int:
        return self.chunks[-1].stop if self.chunks else self.local_blocks

    @property
    def usable(self) -> int:
        """Number of leading blocks that can be used."""
        stop = self.local_blocks
        for chunk in self.chunks:
            if not chunk.usable:
                break
            stop = chunk.stop
        return stop

    def cached_in(self, usable: int) -> int:
        """Blocks among the usable ones that the source had in its prefix cache."""
        return sum(chunk.cached for chunk in self.chunks if chunk.stop <= usable)

    def add_chunk(self, offer: Offer, ranks: int) -> tuple[tuple[int, ...], ...] | None:
        """Adds the next chunk, for `ranks` ranks; returns the blocks reserved for it by cache group, None if it is not
        the next one.
        """
        if self.reserved is None or (offer.chunk, offer.first) != (len(self.chunks), self.offered):
            return None
        if not offer.first < offer.stop <= self.blocks or len(offer.blocks) != len(self.reserved):
            return None
        mine = []
        for row, (start, stop) in zip(self.reserved, self.wanted, strict=True):
            first, last = max(start, offer.first), min(stop, offer.stop)
            mine.append(tuple(row[first - start : last - start]) if last > first else ())
        if [len(row) for row in mine] != [len(row) for row in offer.blocks]:
            return None
        self.chunks.append(Chunk(offer.first, offer.stop, set(range(ranks)), offer.cached))
        return tuple(mine)

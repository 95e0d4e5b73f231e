"""One fetch of a prompt's blocks: its chunks, and how far they can be used."""

from dataclasses import dataclass, field

from headrace_worker.kv.manager import BlockTable
from headrace_worker.request import Request
from headrace_worker.transfer.shards import Span


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Times in seconds, on this replica's clock."""

    least_blocks: int = 2  # fewer are computed here
    silence: float = 2.0  # without a word about a fetch until it is given up
    least: float = 2.0  # that a fetch may take at any rate
    most: float = 600.0  # that it may take, whatever is predicted
    patience: float = 2.0  # times what the blocks would take here, the queue included, that a fetch may take
    share: float = 0.5  # of what a request's deadline leaves
    renew: float = 0.5  # between two signs of life to a source
    avoid: float = 1.0  # that a source which was lost is not asked
    watermark: float = 0.05  # share of the pool that reservations leave to those who run


@dataclass(slots=True)
class FetchCounters:
    """Monotonic."""

    started: int = 0
    done: int = 0
    failed: int = 0
    num_bytes: int = 0
    seconds: float = 0.0  # of those that were done


@dataclass(slots=True)
class Chunk:
    """Blocks that a source offers, from `first` to before `stop`."""

    first: int
    stop: int
    missing: set[int]  # ranks that have not received it
    committed: bool = False

    @property
    def usable(self) -> bool:
        return self.committed and not self.missing


@dataclass(slots=True)
class Fetch:
    """From the asking until its request is queued."""

    number: int
    peer: str
    request: Request
    blocks: int
    have: int  # blocks that were here already
    held: BlockTable
    wanted: list[Span]  # per cache group
    until: float
    began: float
    heard: float
    reserved: list[list[int]] | None = None  # per cache group: one for each wanted index
    chunks: list[Chunk] = field(default_factory=list)

    @property
    def offered(self) -> int:
        return self.chunks[-1].stop if self.chunks else self.have

    @property
    def usable(self) -> int:
        """Blocks from the first on that can be used."""
        stop = self.have
        for chunk in self.chunks:
            if not chunk.usable:
                break
            stop = chunk.stop
        return stop

"""One grant: a prompt's blocks that another replica may read, and how many of them were offered."""

from dataclasses import dataclass, field

from headrace_worker.core.kv.manager import BlockTable
from headrace_worker.core.request import Request
from headrace_worker.core.transfer.fetch import patience
from headrace_worker.core.transfer.shards import Span


def lease(step_seconds: float) -> float:
    """Seconds since the newest message of a target, until its grants end. step_seconds: the longest that it was told.

    Longer than the target waits for an answer, and uses what it reads.
    """
    return 1.5 * patience(step_seconds) + 1.0


@dataclass(frozen=True, slots=True)
class GrantLimits:
    max_grants: int = 64  # at a time; of a tenant with less than its part up to twice as many
    watermark: float = 0.05  # share of the pool that grants leave to running requests


@dataclass(slots=True)
class Grant:
    """From the answer to a request until the target's word that it is over, or the end of the lease."""

    peer: str
    fetch: int
    tenant: bytes
    blocks: int
    wanted: list[Span]  # per cache group
    request: Request | None  # until all is computed
    offered: int  # leading blocks that the target has, or that were offered
    table: BlockTable | None = None  # of the request, from which chunks were offered
    chunks: int = 0
    held: list[int] = field(default_factory=list)  # the blocks that were offered, referenced for the target
    slots: list[int] = field(default_factory=list)  # with its recurrent state, once it was offered
    uncommitted: list[tuple[int, int]] = field(default_factory=list)  # (step, chunk)
    failed: bool = False

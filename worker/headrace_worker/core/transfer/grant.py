"""One grant: a prompt's blocks that this replica sends to another one, and how many of them were sent."""

from dataclasses import dataclass, field

from headrace_worker.core.kv.manager import BlockTable
from headrace_worker.core.request import Request
from headrace_worker.core.transfer.shards import Span


@dataclass(frozen=True, slots=True)
class GrantLimits:
    """Times in seconds, on this replica's clock."""

    max_grants: int = 64  # at a time; of a tenant with less than its part up to twice as many
    lease: float = 5.0  # without a message of the target until its grants end
    renew: float = 0.5  # between two renewals to a target
    watermark: float = 0.05  # share of the pool that grants leave to running requests


@dataclass(slots=True)
class Grant:
    """From the answer to a request until the target has all blocks, or the grant is dropped."""

    peer: str
    fetch: int
    tenant: bytes
    blocks: int
    wanted: list[Span]  # per cache group
    request: Request | None  # until all is computed
    table: BlockTable | None = None  # from then on; before, the request's table that chunks were sent from
    sent: int = 0  # leading blocks that the target has, or that were sent
    chunks: int = 0
    uncommitted: list[tuple[int, int]] = field(default_factory=list)  # (step, chunk)

    @property
    def complete(self) -> bool:
        """Whether all blocks were sent and are known to be computed."""
        return self.sent == self.blocks and not self.uncommitted

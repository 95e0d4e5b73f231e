"""Control messages between source and target, as plain data.

target ── FetchRequest ─────────▶ source    Granted | Refused at once; then per chunk an Offer when its step is planned,
       ── Renew, Cancel, Done ──▶           and a Commit when the step is known to have computed it; Failed when no more
                                            will follow; Renewed at once
"""

from msgspec import Struct


class FetchRequest(Struct, frozen=True, tag="request"):
    """Compute the blocks of these tokens, and offer those that the target does not have."""

    fetch: int
    tenant_salt: bytes
    adapter: str
    token_ids: list[int]  # a whole number of blocks
    held: int  # leading blocks that the target holds
    cached_only: bool = False  # only what is cached is offered, or nothing
    priority: int = 0
    timeout: float = 0.0  # seconds; a source that predicts more refuses; 0 = no limit


class Cancel(Struct, frozen=True, tag="cancel"):
    """The target does not read blocks of the fetch any more: the source can release them."""

    fetch: int


class Done(Struct, frozen=True, tag="done"):
    """The target has all blocks: the source can release them."""

    fetch: int


class Renew(Struct, frozen=True, tag="renew"):
    """The target is alive: its fetches continue."""

    number: int


class Granted(Struct, frozen=True, tag="granted"):
    """The first `blocks` blocks will be offered: fewer than requested if only cached ones are."""

    fetch: int
    blocks: int
    step_seconds: float  # that a step of the source may take, between which it answers; 0 = not known yet


class Refused(Struct, frozen=True, tag="refused"):
    fetch: int
    reason: str


class Offer(Struct, frozen=True, tag="offer"):
    """The next chunk of a fetch: blocks [first, stop) of the prompt, which are in these blocks of the source.

    Those of one cache group may be fewer: what no query of the target attends to is left out.
    """

    fetch: int
    chunk: int
    first: int
    stop: int
    blocks: tuple[tuple[int, ...], ...]  # per cache group
    computed: bool  # they can be read at once; else each rank notifies the target's ranks as it has computed layers
    cached: int = 0  # leading blocks of the chunk that were in the source's prefix cache


class Commit(Struct, frozen=True, tag="commit"):
    """The chunk's blocks were computed."""

    fetch: int
    chunk: int


class Failed(Struct, frozen=True, tag="failed"):
    """No further chunk follows, and those that are not committed are invalid."""

    fetch: int
    reason: str


class Renewed(Struct, frozen=True, tag="renewed"):
    """The source has the Renew of this number: it holds what the target's fetches may read for another lease."""

    number: int
    step_seconds: float


ToSource = FetchRequest | Cancel | Done | Renew
FromSource = Granted | Refused | Offer | Commit | Failed | Renewed

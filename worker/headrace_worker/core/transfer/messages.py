"""Control messages between source and target, as plain data.

target ── FetchRequest ─────────▶ source    Granted | Refused at once; then per chunk an Offer when its step is planned,
       ── Renew, Cancel, Done ──▶           and a Commit when the step is known to have computed it; Failed when no more
                                            will follow
"""

from msgspec import Struct


class FetchRequest(Struct, frozen=True):
    """Compute the blocks of these tokens, and push those that the target does not have."""

    fetch: int
    tenant_salt: bytes
    adapter: str
    token_ids: list[int]  # a whole number of blocks
    held: int  # leading blocks that the target holds
    cached_only: bool = False  # only what is cached is sent, or nothing
    priority: int = 0
    timeout: float = 0.0  # seconds; a source that predicts more refuses; 0 = no limit


class Cancel(Struct, frozen=True):
    """The target cancels the fetch."""

    fetch: int


class Done(Struct, frozen=True):
    """The target has all blocks: the source can release them."""

    fetch: int


class Renew(Struct, frozen=True):
    """The target is alive: its fetches continue."""


class Granted(Struct, frozen=True):
    """The first `blocks` blocks will be sent: fewer than requested if only cached ones are."""

    fetch: int
    blocks: int
    block_seconds: float = 0.0  # that sending a block takes, as measured; 0 = not known yet


class Refused(Struct, frozen=True):
    fetch: int
    reason: str


class Offer(Struct, frozen=True):
    """The next chunk of the pair: blocks [first, stop) of the prompt, so many of each cache group."""

    fetch: int
    chunk: int
    first: int
    stop: int
    counts: tuple[int, ...]
    cached: int = 0  # leading blocks of the chunk that were in the source's prefix cache


class Commit(Struct, frozen=True):
    """The chunk's blocks were computed."""

    fetch: int
    chunk: int


class Failed(Struct, frozen=True):
    """The source ended the fetch."""

    fetch: int
    reason: str


ToSource = FetchRequest | Cancel | Done | Renew
FromSource = Granted | Refused | Offer | Commit | Failed

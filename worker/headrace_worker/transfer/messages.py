"""What source and target say to each other beside the bytes: the wire's messages as plain data.

target ── Ask ──▶ source      Granted | Refused at once; then per chunk an Offer when its step is planned, and a Commit
       ── Renew, Cancel, Done ──▶      when the step is known to have computed it; Failed when no more will come
"""

from msgspec import Struct


class Ask(Struct, frozen=True):
    """Compute the first `blocks` blocks of these tokens, and push those that the target does not have."""

    fetch: int
    tenant_salt: bytes
    adapter: str
    token_ids: list[int]  # a whole number of blocks
    have: int  # blocks from the first on that the target holds
    compute: bool = True  # else only what is cached is sent, or nothing
    priority: int = 0
    patience: float = 0.0  # seconds; a source that predicts more refuses; 0 = any time will do


class Cancel(Struct, frozen=True):
    """The target wants no more of it."""

    fetch: int


class Done(Struct, frozen=True):
    """The target has it all: the source's blocks need not be held any more."""

    fetch: int


class Renew(Struct, frozen=True):
    """The target lives and wants its fetches to go on."""


class Granted(Struct, frozen=True):
    """So many blocks from the first on will be there: fewer than asked for where only cached ones are sent."""

    fetch: int
    blocks: int


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


class Commit(Struct, frozen=True):
    """The chunk's blocks were computed."""

    fetch: int
    chunk: int


class Failed(Struct, frozen=True):
    """Nothing more comes of this fetch."""

    fetch: int
    reason: str


ToSource = Ask | Cancel | Done | Renew
FromSource = Granted | Refused | Offer | Commit | Failed

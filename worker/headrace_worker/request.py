"""One attempt to generate one choice, as the engine sees it: tokens, targets and what it holds."""

from dataclasses import dataclass, field
from enum import Enum

from msgspec import Struct

from headrace_worker.guide import TokenGuide
from headrace_worker.kv.manager import BlockTable, PrefixChain
from headrace_worker.plan import RowSampling, SampledLogprobs


class Finish(Enum):
    """Why an attempt ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"
    REFUSED = "refused"


@dataclass(slots=True, eq=False)
class Request:
    """Scheduling state of one attempt. Positions count from 0 over prompt and output tokens alike.

    `computed` is the number of leading positions whose computation is scheduled or done; `in_flight` counts sampled
    tokens that are not read back yet. The request wants to reach ``len(tokens) + in_flight`` computed positions.
    """

    attempt_id: bytes
    tokens: list[int]  # prompt, outputs of earlier attempts, outputs of this one
    prompt_len: int
    max_len: int  # tokens at which generation ends for length
    sampling: RowSampling
    stop_ids: frozenset[int]
    chain: PrefixChain
    arrival: float
    priority: int = 0
    deadline: float | None = None  # on the engine's clock
    label: str = ""
    tenant_salt: bytes = b""
    adapter: str = ""
    prefill_only: bool = False  # for another replica: no token is drawn
    source: str = ""  # "host:port" of a replica to fetch KV blocks from
    cached_only: bool = False  # the source sends what it holds, and computes nothing
    guide: TokenGuide | None = None  # given fresh: takes in the outputs of earlier attempts here

    row: int = -1
    table: BlockTable | None = None
    computed: int = 0
    in_flight: int = 0
    finish: Finish | None = None
    complete: bool = False  # its guide lets nothing follow
    suspect: bool = False  # was part of a step that failed: computed alone until a step succeeds
    void_until: int = 0  # results of steps up to this one mean nothing: one of them failed
    started: float | None = None
    cached_tokens: int = 0
    preemptions: int = 0
    emitted: int = field(init=False)  # tokens delivered, prompt included
    announced: bool = False  # the first output, with cached_tokens and queue time, was made

    def __post_init__(self) -> None:
        self.emitted = len(self.tokens)
        if self.guide is not None:
            for token in self.tokens[self.prompt_len :]:
                self.guide.advance(token)

    @property
    def missing(self) -> int:
        """Positions to compute before the next token can be drawn."""
        return len(self.tokens) + self.in_flight - self.computed

    def guide_takes(self, token: int) -> bool:
        """Has the guide take in the token that was drawn, unless it ends the request anyway; False when it fails."""
        try:
            if self.guide is not None and token not in self.stop_ids:
                self.guide.advance(token)
                self.complete = self.guide.finished
        except Exception:
            return False
        return True


class Output(Struct, gc=False):
    """What a step brought to one attempt. A Struct, as one is made per token."""

    attempt_id: bytes
    first_index: int  # index of the first token among all outputs of the choice
    token_ids: list[int]
    logprobs: list[SampledLogprobs] = []
    finish: Finish | None = None
    error: str = ""
    cached_tokens: int | None = None  # set in the first output of an attempt
    queue_seconds: float | None = None
    preemptions: int = 0

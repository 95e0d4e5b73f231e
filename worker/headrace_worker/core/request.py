"""One attempt to generate one choice, in the engine: tokens, limits, row and blocks."""

from dataclasses import dataclass, field
from enum import Enum

from msgspec import Struct

from headrace_worker.core.guide import TokenGuide
from headrace_worker.core.kv.manager import BlockTable, PrefixChain
from headrace_worker.core.plan import RowSampling, SampledLogprobs
from headrace_worker.core.request_times import AttemptTimes, RequestTimes


class Finish(Enum):
    """Why an attempt ended."""

    STOP = "stop"
    COMPLETE = "complete"  # its guide allows no further token
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"
    NOT_FINITE = "not_finite"  # the model's output was not finite: the device may be defective
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Fetched:
    """Positions [start, stop) of a request whose KV blocks were fetched from another replica.

    The first `cached` of them were in that replica's prefix cache; the rest was computed for this request.
    """

    start: int = 0
    stop: int = 0
    cached: int = 0

    def local_hit(self, hit: int) -> int:
        """Returns how many of the first `hit` positions this replica's prefix cache had without the fetch."""
        return hit - max(0, min(hit, self.stop) - self.start)

    def cached_hit(self, hit: int) -> int:
        """Returns how many of the first `hit` positions the prefix cache of this or of the other replica had."""
        return hit - max(0, min(hit, self.stop) - self.start - self.cached)


@dataclass(slots=True, eq=False)
class Request:
    """Scheduling state of one attempt. Positions count from 0 over prompt and output tokens alike.

    `computed` is the number of leading positions whose computation is scheduled or done; `in_flight` counts sampled
    tokens that are not read back yet. The target is ``len(tokens) + in_flight`` computed positions.
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
    prefill_only: bool = False  # for another replica: no token is sampled
    expected_cached: int = 0  # tokens that its router expects in the cache: an estimate, for the load only
    source: str = ""  # "host:port" of a replica to fetch KV blocks from
    cached_only: bool = False  # the source sends cached blocks, and computes nothing
    fetched: Fetched = Fetched()  # set when a fetch has ended
    prompt_logprobs: list[SampledLogprobs] = field(default_factory=list)  # positions from 1 on, as far as computed
    guide: TokenGuide | None = None  # passed in its initial state, and advanced here by the outputs of earlier attempts

    row: int = -1
    table: BlockTable | None = None
    computed: int = 0
    in_flight: int = 0
    finish: Finish | None = None
    complete: bool = False  # its guide allows no further token
    suspect: bool = False  # was in a step that failed: computed alone until a step succeeds
    discard_until_step: int = 0  # results of steps up to this one are discarded: one of them failed
    started: float | None = None
    cached_tokens: int = 0  # prompt tokens that were cached when the request was first admitted
    preemptions: int = 0
    emitted: int = field(init=False)  # tokens delivered, prompt included
    has_output: bool = False  # the first output, with cached_tokens and queue time, was emitted
    times: RequestTimes = field(default_factory=RequestTimes)
    counts_prompt: bool = field(init=False)  # exactly one attempt and choice of a prompt counts it

    def __post_init__(self) -> None:
        self.emitted = len(self.tokens)
        self.counts_prompt = self.emitted == self.prompt_len and self.sampling.choice_index == 0
        if self.guide is not None:
            for token in self.tokens[self.prompt_len :]:
                self.guide.advance(token)

    @property
    def scores(self) -> bool:
        """Whether its prompt's tokens still get log-probabilities: a position without them must be computed."""
        return self.sampling.prompt_logprobs is not None and self.emitted == self.prompt_len

    @property
    def missing(self) -> int:
        """Positions to compute before the next token can be sampled."""
        return len(self.tokens) + self.in_flight - self.computed

    def advance_guide(self, token: int) -> bool:
        """Advances the guide by the sampled token, unless it ends the request anyway; False when the guide raises."""
        try:
            if self.guide is not None and token not in self.stop_ids:
                self.guide.advance(token)
                self.complete = self.guide.finished
        except Exception:
            return False
        return True


class Output(Struct, gc=False):
    """The output of a step for one attempt. A Struct, as one is created per token."""

    attempt_id: bytes
    first_index: int  # index of the first token among all outputs of the choice
    token_ids: list[int]
    logprobs: list[SampledLogprobs] = []
    finish: Finish | None = None
    error: str = ""
    cached_tokens: int | None = None  # set in the first output of an attempt
    queue_seconds: float | None = None
    preemptions: int = 0
    times: AttemptTimes | None = None  # in the first output, and in the last one
    prompt_logprobs: list[SampledLogprobs] = []  # in the first output

"""The interface of a placement policy."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import ClassVar, Literal, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from headrace_proto.replica_pb2 import Load, Sampling
from headrace_router.core.replica_blocks import HashScheme, PromptBlocks

Mode = Literal["auto", "shared", "always", "off"]
"""`auto` compares predicted seconds for each request; `shared` does, and prefill replicas may answer, too."""


@dataclass(frozen=True, slots=True)
class ChoiceRequest:
    """One answer to generate: the same for every attempt. `label` is the client's request id: for logs, never a key."""

    label: str
    model: str
    revision: str
    tenant_salt: bytes
    prompt_token_ids: Sequence[int]
    sampling: Sampling
    index: int = 0  # in the response
    priority: int = 0
    deadline_seconds: float | None = None  # since `ChoiceRun.begin`
    session: str = ""  # session that the client named, if any
    grammar: str = ""  # grammar of the output; see `answer/grammar.py`
    blocks: Mapping[HashScheme, PromptBlocks] = field(default_factory=dict)  # prompt blocks; none where not needed


class Candidate(Protocol):
    """A ready replica of the right model and revision."""

    @property
    def replica_id(self) -> str: ...

    @property
    def address(self) -> str:
        """As other replicas know it."""

    @property
    def build(self) -> tuple[str, int]:
        """Id and generation: during a rollout two builds of a replica may be ready."""

    @property
    def is_prefill(self) -> bool:
        """Whether it computes prompts for others."""

    @property
    def load(self) -> Load:
        """As in its newest frame."""

    @property
    def preempted_at(self) -> float:
        """When its load last showed another preemption, in seconds of any clock."""

    @property
    def used_at(self) -> float:
        """When its load last showed a running request, in seconds of any clock that is the same for all candidates."""

    @property
    def unreported(self) -> int:
        """Attempts that were sent and that its reported load cannot include yet."""

    @property
    def queued_tokens(self) -> int:
        """Tokens to compute before those of the next request, as reported, and of what its load cannot include yet."""

    @property
    def kv_tokens(self) -> float:
        """Tokens in its KV cache that requests use, as far as its facts are known."""

    @property
    def free_tokens(self) -> float:
        """Tokens that its KV cache has room for, by dropping what no request uses; 0 = not known."""

    @property
    def drops(self) -> bool:
        """Whether its cache is full: it drops a block for each new one."""

    @property
    def rows(self) -> int:
        """Requests that run at the same time, at most; 0 = not known."""

    @property
    def step_tokens(self) -> int:
        """Tokens that one step computes, at most; 0 = not known."""


Column: TypeAlias = NDArray[np.float64]

# Each column by the attribute that it is read from: of a candidate, of its load, of the step model in it.
_OF_CANDIDATE = {
    "unreported": "unreported",  # requests that were sent, and are not in the reported load
    "queued_tokens": "queued_tokens",  # to compute, before those of the next request; those of `unreported` included
    "kv_tokens": "kv_tokens",  # in use
    "free_tokens": "free_tokens",  # that the cache has room for; 0 = not known
    "drops": "drops",  # 1: its cache is full, a new block replaces another one
    "rows": "rows",  # requests that run at the same time, at most; 0 = not known
    "step_tokens": "step_tokens",  # that one step computes, at most; 0 = not known
    "prefill": "is_prefill",  # 1: computes prompts for others; a candidate only where policies share roles
    "preempted_at": "preempted_at",  # when a request there was preempted
    "used_at": "used_at",  # when it last ran a request: how old its step model is
}
_OF_LOAD = {
    "running": "running",  # requests
    "waiting": "waiting",
    "kv_usage": "kv_usage",
    "last_step_ms": "predicted_step_ms",  # predicted time of the newest step
    "load_token_ms": "load_token_ms",  # for each token in host memory or on disk
}
_OF_STEP_MODEL = {  # in seconds, as the replica has fitted them; 0 = not known
    "base": "base_ms",  # per step; the next three are per token or sequence
    "per_prefill_token": "per_prefill_token_ms",
    "per_decode_sequence": "per_decode_sequence_ms",
    "per_kv_token": "per_kv_token_ms",
    "error": "error_ms",  # that its predictions of a step are off
}
_ATTRIBUTES = _OF_CANDIDATE | _OF_LOAD | _OF_STEP_MODEL
COLUMNS = {name: place for place, name in enumerate(_ATTRIBUTES)}
"""The place of each column in a row."""

_read_candidate, _read_load, _read_step_model = (
    attrgetter(*attributes.values()) for attributes in (_OF_CANDIDATE, _OF_LOAD, _OF_STEP_MODEL)
)


def row(candidate: Candidate) -> tuple[float, ...]:
    """The entries of one candidate, in the order of COLUMNS."""
    load = candidate.load
    seconds = [milliseconds / 1e3 for milliseconds in _read_step_model(load.step_model)]
    return *_read_candidate(candidate), *_read_load(load), *seconds


class View:
    """Candidates of a decision, and their columns: `view.of("running")`.

    The columns are valid until the decision is made: they may be the table's own, which change with the next report.
    """

    __slots__ = ("candidates", "data")

    def __init__(self, candidates: Sequence[Candidate], data: NDArray[np.float64]) -> None:
        """data: [columns, candidates]."""
        self.candidates = candidates
        self.data = data

    def __len__(self) -> int:
        return len(self.candidates)

    def of(self, name: str) -> Column:
        """The column with this name."""
        column: Column = self.data[COLUMNS[name]]
        return column

    def at(self, places: Sequence[int]) -> "View":
        """Some of the candidates."""
        return View([self.candidates[place] for place in places], self.data[:, places])

    @property
    def requests(self) -> Column:
        """Requests that run, wait, or were sent."""
        requests: Column = self.of("running") + self.of("waiting") + self.of("unreported")
        return requests


@dataclass(frozen=True, slots=True)
class Way:
    """How a candidate would get the KV blocks of a prompt, with the seconds of the first token and of others' delay.

    At most one of `source` and `holder` is set.
    """

    target: int
    first_token: float
    delay: float
    source: int | None = None
    holder: int | None = None


Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PlacementTask:
    """What is to be placed. `cached`: tokens of the prompt in each candidate's KV cache, or soon; 0 where not known."""

    request: ChoiceRequest
    output_tokens: int  # tokens of earlier attempts, to be computed again
    cached: Tokens
    offloaded: Tokens  # tokens of `cached` that are only in host memory or on disk
    held: Tokens  # the same as `cached`, of those that are in its cache already: others can fetch them
    sources_cached: Tokens  # the same of each prefill replica
    answer_tokens: float  # that are expected
    disaggregation: Mode = "shared"
    least_disaggregated: int = 0  # tokens of the shortest prompt that a prefill replica may compute
    reused: float = 0.0  # share of the blocks that full caches drop, that are asked for again

    @property
    def tokens(self) -> int:
        """All that a replica without any of them computes."""
        return len(self.request.prompt_token_ids) + self.output_tokens

    @property
    def may_disaggregate(self) -> bool:
        """Whether a prefill replica may compute the prompt."""
        allowed = self.disaggregation != "off" and self.tokens >= self.least_disaggregated
        return allowed and len(self.sources_cached) > 0


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted times of one request on one replica, in seconds."""

    first_token: float
    answer: float  # after the first token
    delay: float  # delay of all other requests together


@dataclass(frozen=True, slots=True)
class RequestPlacement:
    """Where a request runs. At most one of `source` and `holder` is set."""

    target: int  # index of the candidate that decodes
    source: int | None = None  # index of the prefill replica that computes the prompt for it
    holder: int | None = None  # index of the candidate from whose cache the target fetches a part of the prompt
    prediction: Prediction | None = None
    costs: Column | None = None  # predicted seconds of every candidate, the prompt computed there


class Policy(ABC):
    """Pure: no clock, no I/O; called on the event loop, so it must be quick."""

    uses_cache: ClassVar[bool] = False
    """Whether `PlacementTask.cached` is needed: prompts are not hashed for policies that do not read it."""

    shares_roles: ClassVar[bool] = False
    """Whether prefill replicas can be candidates, too: they are with the mode `shared`."""

    @abstractmethod
    def plan(self, view: View, sources: View, work: PlacementTask) -> RequestPlacement:
        """For at least one candidate, and the prefill replicas that may compute the prompt, if any.

        Equal candidates should take turns: otherwise the first one gets all requests while the others are idle.
        """


def first_after(equal: NDArray[np.bool_], turn: int) -> int:
    """The index of the first equal candidate in rotation: with each turn another one is first."""
    count = len(equal)
    start = turn % count
    after = int(equal[start:].argmax())
    return start + after if equal[start + after] else int(equal.argmax())

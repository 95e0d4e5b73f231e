"""The interface of a placement policy."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from headrace_router.core.choice_request import ChoiceRequest
from headrace_router.core.disaggregation_mode import Mode
from headrace_router.core.policy.view import Column, View

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be placed. `cached`: tokens of the prompt in each candidate's KV cache, or soon; 0 where not known."""

    request: ChoiceRequest
    output_tokens: int  # of earlier attempts, to be computed again
    cached: Tokens
    held: Tokens  # the same, of those that are in its cache already: others can fetch them
    sources_cached: Tokens  # the same of each prefill replica
    answer_tokens: float  # that are expected
    disaggregation: Mode = "auto"
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
    """Of one request on one replica, in seconds."""

    first_token: float
    answer: float  # after the first token
    delay: float  # of all others together


@dataclass(frozen=True, slots=True)
class Plan:
    """Where a request runs. At most one of `source` and `holder` is set."""

    target: int  # index of the candidate that decodes
    source: int | None = None  # index of the prefill replica that computes the prompt for it
    holder: int | None = None  # index of the candidate from whose cache the target fetches a part of the prompt
    prediction: Prediction | None = None
    costs: Column | None = None  # predicted seconds of every candidate, the prompt computed there


class Policy(ABC):
    """Pure: no clock, no I/O; called on the event loop, so it must be quick."""

    uses_cache: ClassVar[bool] = False
    """Whether `Work.cached` is needed: prompts are not hashed for policies that do not read it."""

    shares_roles: ClassVar[bool] = False
    """Whether prefill replicas can be candidates, too: they are with the mode `shared`."""

    @abstractmethod
    def plan(self, view: View, sources: View, work: Work) -> Plan:
        """For at least one candidate, and the prefill replicas that may compute the prompt, if any.

        Equal candidates should take turns: otherwise the first one gets all requests while the others are idle.
        """


def first_after(equal: NDArray[np.bool_], turn: int) -> int:
    """The index of the first equal candidate in rotation: with each turn another one is first."""
    count = len(equal)
    start = turn % count
    after = int(equal[start:].argmax())
    return start + after if equal[start + after] else int(equal.argmax())

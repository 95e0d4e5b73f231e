"""The interface of a placement policy, and what policies read of a replica."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from headrace_proto.replica_pb2 import Load
from headrace_router.core.choice_request import ChoiceRequest


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
    def load(self) -> Load:
        """As in its newest frame."""

    @property
    def unreported(self) -> int:
        """Attempts that were sent and that its reported load cannot include yet."""

    @property
    def unreported_tokens(self) -> int:
        """Tokens of these attempts that will be computed there."""

    @property
    def remote_prompt_tokens(self) -> int:
        """Tokens of prompts that other replicas fetch from it, not known to be computed."""

    @property
    def kv_tokens(self) -> float:
        """Tokens in its KV cache, as far as its facts are known."""

    @property
    def rows(self) -> int:
        """Requests that run at the same time, at most; 0 = not known."""

    @property
    def step_tokens(self) -> int:
        """Tokens that one step computes, at most; 0 = not known."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be placed."""

    request: ChoiceRequest
    output_tokens: int  # of earlier attempts, to be computed again
    cached: Sequence[int]  # by candidate: tokens of the prompt that are in its KV cache, or will be; 0 where not known

    @property
    def tokens(self) -> int:
        """All that a replica without any of them computes."""
        return len(self.request.prompt_token_ids) + self.output_tokens


class Policy(ABC):
    """Chooses the replica for a request. Pure: no clock, no I/O; called on the event loop, so it must be quick."""

    uses_cache: ClassVar[bool] = False
    """Whether `Work.cached` is needed: prompts are not hashed for policies that do not read it."""

    @abstractmethod
    def choose(self, candidates: Sequence[Candidate], work: Work) -> int:
        """The index of the best of at least one candidate.

        Equal candidates should take turns: otherwise the first one gets all requests while the others are idle.
        """

"""The interface of a placement policy, and what policies read of a replica."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

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


class Policy(ABC):
    """Chooses the replica for a request. Pure: no clock, no I/O; called on the event loop, so it must be quick."""

    @abstractmethod
    def choose(self, candidates: Sequence[Candidate], request: ChoiceRequest, output_tokens: int) -> int:
        """The index of the best of at least one candidate. output_tokens: of earlier attempts, to be computed again.

        Equal candidates should take turns: otherwise the first one gets all requests while the others are idle.
        """

"""The interface of a placement policy and its inputs."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace_proto.replica_pb2 import Load


@dataclass(frozen=True, slots=True)
class Work:
    """What is to be placed."""

    prompt_token_ids: Sequence[int]
    output_tokens_so_far: int
    tenant_salt: bytes
    max_tokens: int


class Candidate(Protocol):
    """A ready replica of the right model and revision."""

    @property
    def replica_id(self) -> str: ...

    @property
    def load(self) -> Load:
        """As in its newest frame."""

    @property
    def unreported(self) -> int:
        """Attempts that were sent and that its reported load cannot include yet."""


class Policy(ABC):
    """Chooses the replica for a request. Pure: no clock, no I/O; called on the event loop, so it must be quick."""

    @abstractmethod
    def choose(self, candidates: Sequence[Candidate], work: Work) -> int:
        """The index of the best of at least one candidate."""

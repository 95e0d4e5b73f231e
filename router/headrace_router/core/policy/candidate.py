"""What policies read of a replica."""

from typing import Protocol

from headrace_proto.replica_pb2 import Load


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

"""The replica from which another one fetches a prompt's KV blocks."""

from dataclasses import dataclass
from typing import Generic

from headrace_proto.replica_pb2 import Source
from headrace_router.core.replica_state import C, ReplicaState


@dataclass(frozen=True, slots=True)
class KvSource(Generic[C]):
    """A replica that holds the prompt's KV blocks, or computes them for another one."""

    replica: ReplicaState[C]
    cached_only: bool  # it sends the blocks that it holds, and computes none

    def message(self) -> Source:
        return Source(replica_id=self.replica.replica_id, address=self.replica.address, cached_only=self.cached_only)

    def expect(self, attempt_id: bytes, tokens: int, target: ReplicaState[C]) -> None:
        """An attempt starts at the target, whose prompt it may have to compute."""
        if not self.cached_only:
            self.replica.add_remote_prompt(attempt_id, tokens, lambda: target.has_reported(attempt_id))

    def remove(self, attempt_id: bytes) -> None:
        """The prompt is computed, or not needed any more."""
        self.replica.discard_remote_prompt(attempt_id)

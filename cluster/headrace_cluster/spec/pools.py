"""The pools of a spec."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from headrace_proto.role import Role


@dataclass(frozen=True, slots=True)
class Pool:
    """Replicas of one role and one shape."""

    role: Role
    replicas: int
    tp: int
    pp: int
    node_labels: Mapping[str, str] = field(default_factory=dict)  # of the nodes where its ranks run

    @property
    def ranks(self) -> int:
        """Actors of the whole pool."""
        return self.replicas * self.tp * self.pp

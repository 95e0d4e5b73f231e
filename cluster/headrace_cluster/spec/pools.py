"""The pools of a spec."""

from dataclasses import dataclass

from headrace_proto.role import Role


@dataclass(frozen=True, slots=True)
class Pool:
    """Replicas of one role and one shape."""

    role: Role
    replicas: int
    tp: int
    pp: int

    @property
    def ranks(self) -> int:
        """Actors of the whole pool."""
        return self.replicas * self.tp * self.pp

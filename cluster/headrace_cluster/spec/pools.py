"""Roles of replicas, and the pools of a spec. A role only affects scheduling: every replica can do both."""

from dataclasses import dataclass
from enum import StrEnum


class Role(StrEnum):
    """What routers use a replica for."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def decodes(self) -> bool:
        """Whether routers place requests on such a replica."""
        return self is not Role.PREFILL


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

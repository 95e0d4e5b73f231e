"""The role of a replica: a name in configs and commands, a number in messages. Every replica can do both."""

from enum import StrEnum

from headrace_base.errors import HeadraceError
from headrace_proto import replica_pb2 as pb


class UnknownRoleError(HeadraceError):
    """The role's name is unknown."""


class Role(StrEnum):
    """What routers use a replica for."""

    BOTH = "both"
    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def decodes(self) -> bool:
        """Whether routers place requests on such a replica."""
        return self is not Role.PREFILL

    @property
    def prefills(self) -> bool:
        """Whether such a replica computes prompts that another one fetches."""
        return self is not Role.DECODE

    @property
    def number(self) -> pb.Role:
        """In messages."""
        number: pb.Role = getattr(pb, f"ROLE_{self.name}")
        return number


def parse_role(name: str) -> Role:
    """The role with this name. Raises UnknownRoleError."""
    try:
        return Role(name)
    except ValueError:
        raise UnknownRoleError(f"a role is prefill, decode or both, not {name!r}") from None
